"""Connections whose request never arrives are closed; those that wait for an answer are not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from outrider.gateway.timed_protocol import MAX_HEADER_BYTES, MAX_PIPELINED_BYTES, TimedProtocol

_REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
_ANSWER_S = 0.6


async def _app(scope: Any, receive: Any, send: Any) -> None:
    del scope
    await receive()
    await asyncio.sleep(_ANSWER_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr("outrider.gateway.timed_protocol.REQUEST_TIMEOUT_S", 0.3)
    config = uvicorn.Config(_app, port=0, http=TimedProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", _REQUEST[:-1]])
async def test_a_request_that_does_not_arrive_closes_its_connection(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(240):
        with pytest.raises(ConnectionError):
            if not await reader.read():
                raise ConnectionError
    writer.close()


async def test_an_answer_may_take_longer_and_the_next_request_is_waited_for_anew(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(240):
        for _ in range(2):
            writer.write(_REQUEST)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"ok"
        writer.write(_REQUEST[:20])
        with pytest.raises(ConnectionError):
            if not await reader.read():
                raise ConnectionError
    writer.close()


@pytest.mark.parametrize(
    "begun", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nX: "]
)
@pytest.mark.parametrize("more", [b"a" * 4096, b"a: b\r\n" * 512], ids=["one", "many"])
async def test_headers_without_an_end_are_refused(port: int, begun: bytes, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    num_sent = 0
    async with asyncio.timeout(240):
        with contextlib.suppress(ConnectionError):
            while num_sent < 64 * MAX_HEADER_BYTES:
                await asyncio.sleep(0)
                writer.write(more)
                await writer.drain()
                num_sent += len(more)
    assert num_sent < 64 * MAX_HEADER_BYTES
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def test_long_headers_and_bodies_in_pieces_are_read(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.gateway.timed_protocol.REQUEST_TIMEOUT_S", 60.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nX: " + b"a" * (MAX_HEADER_BYTES // 2) + b"\r\nContent-Length: 50000\r\n\r\n")
    for _ in range(5):
        writer.write(b"b" * 10_000)
        await asyncio.sleep(0.01)
    async with asyncio.timeout(240):
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_a_websocket_is_asked_for_by_a_request_like_any_other(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with asyncio.timeout(240):
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert caplog.messages == []


@pytest.mark.parametrize("size", [MAX_PIPELINED_BYTES // 2, 3 * MAX_PIPELINED_BYTES])
async def test_requests_that_wait_behind_another_are_bounded(port: int, size: int) -> None:
    """Requests before them are answered, and then the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_REQUEST)
    await writer.drain()
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (size, b"a" * size) * 20)
    async with asyncio.timeout(240):
        answers = await reader.read()
    assert 1 <= answers.count(b" 200 ") <= 1 + 2 * MAX_PIPELINED_BYTES // size + 4
    assert answers.count(b"connection: close") == 1
    writer.close()
