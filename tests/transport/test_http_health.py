"""Health over HTTP says what the gRPC health says."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.config import TargetSettings
from outrider.errors import ConfigError
from outrider.transport.http_health import HttpHealth, Probes
from outrider.transport.server import Server, serve_target
from tests.support.scripted_ports import ToyTarget, random_rows


@contextlib.asynccontextmanager
async def serving(**more: Any) -> AsyncIterator[Server]:
    probes = Probes("127.0.0.1", 0)
    server = await serve_target(ToyTarget(random_rows(5), 5), host="127.0.0.1", port=0, probes=probes, **more)
    try:
        yield server
    finally:
        await server.stop()


async def send(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()


async def get(port: int, path: str, method: str = "GET") -> int:
    answer = await send(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\nUser-Agent: kube-probe/1.32\r\n\r\n".encode())
    return int(answer.split()[1])


async def states(server: Server) -> tuple[int, int, int]:
    port = server.health_port
    return await get(port, "/livez"), await get(port, "/readyz"), await get(port, "/startupz")


async def test_live_from_the_start_ready_while_serving_started_for_good() -> None:
    async with serving() as server:
        assert await states(server) == (200, 503, 503)
        await server.set_serving(True)
        assert await states(server) == (200, 200, 200)
        await server.set_serving(False)
        assert await states(server) == (200, 503, 200)


async def test_neither_live_nor_ready_when_the_process_has_failed() -> None:
    async with serving() as server:
        await server.set_serving(True)
        await server.fail()
        assert await states(server) == (503, 503, 200)
        await server.set_serving(True)  # late
        assert await states(server) == (503, 503, 200)


async def test_live_and_not_ready_while_it_drains() -> None:
    async with serving() as server:
        await server.set_serving(True)
        draining = asyncio.create_task(server.drain(delay_s=600, grace_s=0))
        async with asyncio.timeout(240):
            while await get(server.health_port, "/readyz") == 200:
                await asyncio.sleep(0.01)
        assert await states(server) == (200, 503, 200)
        draining.cancel()


async def test_what_is_no_probe_gets_an_answer_or_none_and_harms_nobody() -> None:
    async with serving() as server:
        port = server.health_port
        assert await get(port, "/") == 404
        assert await get(port, "/livez?verbose") == 200
        assert await get(port, "/livez", "POST") == 405
        assert (await send(port, b"HEAD /livez HTTP/1.1\r\nHost: x\r\n\r\n")).endswith(b"\r\n\r\n")
        assert b" 400 " in await send(port, b"\x16\x03\x01 no http\r\n\r\n")
        assert b" 400 " in await send(port, b"GET /" + b"x" * 20_000)
        assert await get(port, "/livez") == 200


async def test_a_port_in_use_is_a_clear_error() -> None:
    first, second = HttpHealth(), HttpHealth()
    await first.start("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=r"health_port: 127\.0\.0\.1:\d+ is in use"):
            await second.start("127.0.0.1", first.port)
    finally:
        first.close()


async def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "outrider.telemetry.http_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"health_port: needs uvicorn, which is not installed: .*\[coordinator\]"):
        await HttpHealth().start("127.0.0.1", 0)


def test_where_it_listens() -> None:
    def probes(**settings: Any) -> Probes | None:
        return Probes.of(TargetSettings(model="m", **settings))

    assert probes() is None
    assert probes(host="0.0.0.0", health_port=8080) == Probes("0.0.0.0", 8080)
    assert probes(host="unix:/run/a.sock", health_port=8080) == Probes("127.0.0.1", 8080)
    assert probes(host="unix:/run/a.sock", health_port=8080, health_host="0.0.0.0") == Probes("0.0.0.0", 8080)
