"""Payloads that both processes know: the service's name, and requests that give the length of their reply."""

from __future__ import annotations

import struct

SERVICE = "outrider.benchmarks.Echo"
_HEADER = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size


def make_request(num_bytes: int, reply_bytes: int) -> bytes:
    """A request of at least `HEADER_BYTES`, filled up with a pattern."""
    body = (bytes(range(256)) * (num_bytes // 256 + 1))[: max(0, num_bytes - HEADER_BYTES)]
    return _HEADER.pack(reply_bytes) + body


def reply_to(request: bytes) -> bytes:
    """The last so many bytes of the request, repeated if it is shorter."""
    wanted: int = _HEADER.unpack_from(request)[0]
    if not wanted:
        return b""
    return (request * (wanted // len(request) + 1))[-wanted:]
