"""gRPC transport: conversion, channels, servers, the status table, and the ports over gRPC.

The only package that uses generated protobuf types, apart from the services' servicers.
"""
