"""Servers that listen on a port of their own and are gone after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from outrider.transport.server import Server, serve_draft, serve_generation, serve_target

Serve = Callable[..., Awaitable[Server]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """``await serve("draft" | "target" | "generation", what, host=, port=)``; serving."""
    makers: dict[str, Any] = {"draft": serve_draft, "target": serve_target, "generation": serve_generation}
    servers: list[Server] = []

    async def start(role: str, what: object, *, host: str = "127.0.0.1", port: int = 0) -> Server:
        server: Server = await makers[role](what, host=host, port=port)
        servers.append(server)
        await server.set_serving(True)
        return server

    yield start
    for server in servers:
        await server.stop()
