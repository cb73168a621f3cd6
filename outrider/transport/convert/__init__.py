"""Conversion between protobuf messages and values, as pure functions: one module for each .proto file.

Reading raises ``ProtocolError`` (on a link) or ``InvalidRequestError`` (public requests) for invalid messages.
"""
