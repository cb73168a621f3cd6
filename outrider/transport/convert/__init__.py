"""Pure functions between protobuf messages and our values, both ways: one module for each .proto file.

Reading refuses what breaks the contract with ``ProtocolError`` (on a link) or ``InvalidRequestError`` (a user's
request). Knows no channel and no server.
"""
