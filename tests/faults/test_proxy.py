"""The proxy's faults, each seen from the ends of a connection that passes through it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from outrider.cli.stack.held_ports import HeldPort
from tests.faults.proxy import Direction, Impairment, Proxy

DEADLINE_S = 240.0


class Echo:
    """A server that sends back what it gets, and a proxy in front."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.proxy.port)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        writer.close()

    held = HeldPort()
    server = await asyncio.start_server(answer, "127.0.0.1", held.number)
    proxy = Proxy(f"127.0.0.1:{held.number}")
    await proxy.start()
    yield Echo(proxy)
    await proxy.close()
    server.close()
    held.close()


async def say(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, words: bytes) -> bytes:
    writer.write(words)
    return await asyncio.wait_for(reader.readexactly(len(words)), DEADLINE_S)


async def test_bytes_pass_unchanged_and_late_and_a_few_at_a_time(echo: Echo) -> None:
    reader, writer = await echo.connect()
    assert await say(writer, reader, b"hello") == b"hello"
    echo.proxy.impair(Impairment(delay_s=0.01))
    assert await say(writer, reader, b"late") == b"late"
    echo.proxy.impair(Impairment(bytes_per_s=500))
    assert await say(writer, reader, b"dribbles" * 4) == b"dribbles" * 4
    writer.close()


async def test_stalled_bytes_come_when_the_stall_is_over(echo: Echo) -> None:
    reader, writer = await echo.connect()
    await say(writer, reader, b"a")
    echo.proxy.impair(Impairment(is_stalled=True), Direction.TO_SERVICE)
    writer.write(b"held")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    echo.proxy.restore()
    assert await asyncio.wait_for(reader.readexactly(4), DEADLINE_S) == b"held"
    writer.close()


async def test_a_connection_that_lost_bytes_stays_lost_and_a_new_one_is_well(echo: Echo) -> None:
    reader, writer = await echo.connect()
    await say(writer, reader, b"a")
    echo.proxy.impair(Impairment(is_black_hole=True), Direction.FROM_SERVICE)
    writer.write(b"gone")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    echo.proxy.restore()
    writer.write(b"gone too")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    other_reader, other_writer = await echo.connect()
    assert await say(other_writer, other_reader, b"well") == b"well"
    writer.close()
    other_writer.close()


async def test_cut_refused_and_truncated_connections_end(echo: Echo) -> None:
    reader, writer = await echo.connect()
    await say(writer, reader, b"a")
    echo.proxy.cut()
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(1), DEADLINE_S) == b""
    echo.proxy.refuse()
    reader, writer = await echo.connect()
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(1), DEADLINE_S) == b""
    echo.proxy.restore()
    reader, writer = await echo.connect()
    await say(writer, reader, b"a")
    echo.proxy.truncate(Direction.FROM_SERVICE)
    writer.write(b"12345678")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b"1234"
