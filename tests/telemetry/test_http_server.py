"""Connections that send nothing, or send slowly, take no thread, no place and no time from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest

from outrider.addresses import listening_socket
from outrider.telemetry.http_server import MAX_CONNECTIONS, App, HttpServer, Message, Receive, Send, send_text
from outrider.telemetry.metrics.endpoint import MetricsEndpoint

DEADLINE_S = 240.0


async def answer(scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/bug":
        raise RuntimeError("a bug")
    await send_text(send, HTTPStatus.OK, f"{scope['method']} {scope['path']} {scope['query_string'].decode()}")


async def answer_much(scope: Message, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1024):
        await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})


@contextlib.asynccontextmanager
async def serving(
    app: App = answer, *, max_connections: int = 4, lifetime_s: float = DEADLINE_S
) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, max_connections=max_connections, lifetime_s=lifetime_s)
    await server.start(listening_socket("127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close()


async def ask(server: HttpServer, request: bytes = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    found = await asyncio.wait_for(reader.read(), DEADLINE_S)
    writer.close()
    return found


async def test_one_request_is_answered() -> None:
    async with serving() as server:
        found = await ask(server)
        assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"GET /a b\n" in found
        assert b"connection: close" in found.lower()
        assert (await ask(server, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n")).endswith(b"\r\n\r\n")
        assert b" 500 " in await ask(server, b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n")


@pytest.mark.parametrize("request_", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000])
async def test_what_is_no_request_is_refused(request_: bytes) -> None:
    async with serving() as server:
        assert (await ask(server, request_)).startswith(b"HTTP/1.1 400 ")


async def test_the_oldest_connection_gives_way() -> None:
    async with serving(max_connections=3) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(10)]
        for reader, _ in idle[:6]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        assert (await ask(server)).startswith(b"HTTP/1.1 200")
        assert server.num_connections <= 3
        for _, writer in idle:
            writer.close()


async def test_a_request_that_does_not_come_ends_its_connection() -> None:
    async with serving(lifetime_s=0.05) as server:
        for first in (b"", b"GET / HTTP/1.1\r\nHost:"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(first)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            writer.close()


async def test_a_response_that_is_not_read_ends_its_connection() -> None:
    async with serving(answer_much, lifetime_s=0.2) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            while not server.num_connections:
                await asyncio.sleep(0.001)
            while server.num_connections:
                await asyncio.sleep(0.001)
        writer.close()


@pytest.mark.parametrize("first", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_half_open_sockets_cost_the_metrics_port_no_thread(first: bytes) -> None:
    endpoint = MetricsEndpoint(list, role="draft", host="127.0.0.1", port=0)
    try:
        before = threading.active_count()
        half_open = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(3 * MAX_CONNECTIONS)]
        for connection in half_open:
            with contextlib.suppress(ConnectionError):
                connection.sendall(first)
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=DEADLINE_S) as found:
            assert b"python_gc_objects_collected_total" in found.read()
        assert threading.active_count() <= before  # threads of earlier tests may end meanwhile
        for connection in half_open:
            connection.close()
    finally:
        endpoint.close()
