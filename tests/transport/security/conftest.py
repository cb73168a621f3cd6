"""A public service behind TLS, and an authority for both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.transport.security import ServerSecurity
from outrider.transport.server import Server, serve_generation, serve_target
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.scripted_ports import ToyTarget, random_rows
from tests.transport.security.authorities import Authority

ServeWith = Callable[..., Awaitable[Server]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """An authority that nobody here knows."""
    return Authority(tmp_path, "stranger")


@pytest.fixture
async def serve_with() -> AsyncIterator[ServeWith]:
    """``await serve_with(security, role="generation" | "target", **more)``; serving, gone after the test."""
    servers: list[Server] = []

    async def start(
        security: ServerSecurity,
        *,
        role: str = "generation",
        generator: ScriptedGenerator | None = None,
        **more: Any,
    ) -> Server:
        at: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "security": security, **more}
        if role == "generation":
            server = await serve_generation(generator or ScriptedGenerator(), **at)
        else:
            server = await serve_target(ToyTarget(random_rows(5), 5), **at)
        servers.append(server)
        await server.set_serving(True)
        return server

    yield start
    for server in servers:
        await server.stop()


def at_localhost(server: Server) -> str:
    """The server's address by name, as certificates bear names."""
    return f"localhost:{server.address.rpartition(':')[2]}"
