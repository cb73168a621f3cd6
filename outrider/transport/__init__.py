"""gRPC and nothing else: conversion, channels, servers, the status table, and the ports over the wire.

Protobuf stops here: nothing beyond this package and the services' ``servicer.py`` sees a generated type.
"""
