"""A client of HTTP that does not read: its stream is held up at the coordinator, with little on the way to it."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

from tests.client.conftest import Service
from tests.gateway.conftest import Gateway, wait_until
from tests.support.scripted_generator import INFO

PIECE_BYTES = 4000
MOST_BYTES = 2 << 20
"""Most bytes on the way: in three buffers of kernels, of gRPC and of this test."""


def test_an_unread_stream_stops_the_generation_and_goes_on_when_it_is_read(service: Service, gateway: Gateway) -> None:
    generator = service.generator
    generator.padding = "." * PIECE_BYTES
    num_tokens = 3 * MOST_BYTES // PIECE_BYTES
    body = json.dumps({"model": INFO.target_model, "prompt": [1], "max_tokens": num_tokens, "stream": True}).encode()
    parts = urlsplit(gateway.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
        connection.sendall("\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", "")).encode() + body)
        wait_until(lambda: generator.num_emitted > 100, "output")
        wait_until(lambda: _stands_still(generator), "a pause")
        assert generator.num_emitted * PIECE_BYTES < MOST_BYTES
        found = b""
        while b"[DONE]" not in found[-100:]:
            found += connection.recv(1 << 20)
    assert found.count(b'"text":"<') == num_tokens


def _stands_still(generator: object) -> bool:
    before = generator.num_emitted  # type: ignore[attr-defined]
    time.sleep(0.5)
    return bool(generator.num_emitted == before)  # type: ignore[attr-defined]
