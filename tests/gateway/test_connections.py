"""Connections as raw bytes: pipelined requests whose client leaves, trailers, and headers that are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.transport.security import TokenFile
from tests.client.conftest import Service
from tests.gateway.conftest import Gateway


class Connection:
    """A client that sends what a test says, byte by byte."""

    def __init__(self, gateway: Gateway) -> None:
        host, port = gateway.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=120)

    def send(self, *parts: bytes) -> None:
        self._socket.sendall(b"".join(parts))

    def read_all(self) -> bytes:
        """All bytes until the server closes."""
        self._socket.settimeout(120)
        return b"".join(iter(lambda: self._socket.recv(1 << 16), b""))

    def read_some(self) -> bytes:
        return self._socket.recv(1 << 16)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def connection(gateway: Gateway) -> Iterator[Connection]:
    connection = Connection(gateway)
    yield connection
    connection.close()


def request(*headers: str, prompt: str = "hello", **fields: Any) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 9, **fields}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_behind", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_a_client_that_leaves_ends_all_of_its_pipelined_requests(
    service: Service,
    connection: Connection,
    stream: bool,
    num_behind: int,
    apart: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.generator.stop_after = 2
    sent = request(stream=stream)
    if apart:
        connection.send(sent)
        service.until_asked(1)
        for _ in range(num_behind):
            connection.send(sent)
    else:
        connection.send(sent * (1 + num_behind))
    service.until_asked(1)
    service.until(num_emitted=2)
    connection.close()
    service.until(num_abandoned=1)
    assert service.generator.num_asked == 1
    assert [record for record in caplog.records if record.exc_info] == []


def test_pipelined_requests_are_answered_in_order(service: Service, connection: Connection) -> None:
    connection.send(request() * 2, request("Connection: close", n=3))
    answers = connection.read_all()
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    bodies = [json.loads(part[part.index(b"{") :].split(b"HTTP/1.1")[0]) for part in answers.split(b"HTTP/1.1 200")[1:]]
    assert [len(body["choices"]) for body in bodies] == [1, 1, 3]


def test_a_key_in_a_trailer_opens_nothing(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("secret\n")
    gateway = Gateway(service.address, tokens=TokenFile("api_token_file", str(path)))
    body = b'{"prompt": "hello", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    key = b"Authorization: Bearer secret\r\n"
    try:
        for before, after, status in ((b"", key, b"401"), (key, b"X: y\r\n", b"200")):
            connection = Connection(gateway)
            connection.send(head, b"Transfer-Encoding: chunked\r\n", before, b"\r\n", chunks, after, b"\r\n")
            assert connection.read_all().startswith(b"HTTP/1.1 " + status)
            connection.close()
    finally:
        gateway.close()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("GET /version HTTP/1.1", 400),
        ("GET /version HTTP/1.1\r\nHost: a\r\nHost: a", 400),
        ("GET /version HTTP/1.0\r\nHost: a\r\nHost: b", 400),
        ("GET /version HTTP/1.1\r\nHost: a b", 400),
        ("GET /version HTTP/1.1\r\nHost: a/b@c", 400),
        ("GET /version HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b", 400),
        ("GET /version HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked", 501),
        ("GET /version HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked", 501),
        ("GET /version HTTP/1.0", 200),
        ("GET /version HTTP/1.1\r\nHost:", 200),
        ("GET /version HTTP/1.1\r\nHost: [::1]:8080\r\nConnection: close", 200),
        ("GET /version HTTP/1.1\r\nHost: a.b_c-d:80\r\nTransfer-Encoding: Chunked", 200),
    ],
)
def test_headers_that_could_be_read_in_two_ways_are_refused(connection: Connection, lines: str, status: int) -> None:
    body = "0\r\n\r\n" if "Transfer-Encoding" in lines else ""
    connection.send(f"{lines}\r\n\r\n{body}".encode())
    answer = connection.read_some()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status != 200:
        assert b"connection: close" in answer
        assert json.loads(connection.read_all() or answer.split(b"\r\n\r\n")[1])["error"]["code"] == status


def test_a_compressed_body_is_refused(connection: Connection) -> None:
    connection.send(request("Content-Encoding: gzip"))
    assert connection.read_some().startswith(b"HTTP/1.1 415 ")
