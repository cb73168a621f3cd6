"""Requests: input processing, admission, running state and output collection."""
