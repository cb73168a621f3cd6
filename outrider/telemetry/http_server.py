"""HTTP server of probes and scrapes: uvicorn's parser, with a limited number and lifetime of connections.

One request per connection. When there are too many connections, the oldest is closed, so that idle clients do not block
others. Starts no ``uvicorn.Server``, whose loop would wake the service's own ten times a second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_log = logging.getLogger(__name__)
_CONNECTIONS_LOG = logging.getLogger(f"{__name__}.connections")
_CONNECTIONS_LOG.setLevel(logging.ERROR)  # anyone may send what is no HTTP

MAX_CONNECTIONS = 64
"""Connections at a time: probes and scrapers are few, and the port is open to the network."""
LIFETIME_S = 10.0
"""Time in which a request has to arrive and its response to leave, in seconds."""
MAX_HEADER_BYTES = 8 << 10
"""Bytes of a request's head; those of probes and scrapers have a few hundred."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""ASGI application."""


class HttpServer:
    """Server of one ASGI application on the running event loop."""

    def __init__(self, app: App, *, max_connections: int = MAX_CONNECTIONS, lifetime_s: float = LIFETIME_S) -> None:
        self._config = uvicorn.Config(
            _one_line_on_failure(app),
            http=_Connection,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            headers=[("Connection", "close")],
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._config.load()
        self._state = ServerState()
        self._state.default_headers = self._config.encoded_headers
        self._max_connections, self._lifetime_s = max_connections, lifetime_s
        self._connections: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None
        self.port = 0
        """Port on which it listens."""

    async def start(self, listener: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await asyncio.get_running_loop().create_server(self._connect, sock=listener)
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            self._end(connection)

    def _connect(self) -> asyncio.Protocol:
        while len(self._connections) >= self._max_connections:
            self._end(next(iter(self._connections)))
        connection = _Connection(self._config, self._state, {}, asyncio.get_running_loop())
        connection.limit(self._lifetime_s, on_lost=lambda: self._connections.pop(connection, None))
        self._connections[connection] = None
        return connection

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection]
        connection.abort()


class _Connection(H11Protocol):
    """Connection that is aborted when its time is over."""

    def limit(self, lifetime_s: float, *, on_lost: Callable[[], object]) -> None:
        """Set the time of the connection; ``on_lost`` is called when it has ended."""
        self.logger = _CONNECTIONS_LOG
        self._on_lost = on_lost
        self._expiry = self.loop.call_later(lifetime_s, self.abort)

    def abort(self) -> None:
        """Close without waiting for what is still to be sent."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._expiry.cancel()
        self._on_lost()
        super().connection_lost(exc)


def _one_line_on_failure(app: App) -> App:
    """The application, whose exceptions are one line in the log and status 500."""

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            _log.warning("a request for %s failed: %s: %s", scope["path"], type(error).__name__, error)
            await send_text(send, HTTPStatus.INTERNAL_SERVER_ERROR, "failed")

    return answer


async def send_text(send: Send, status: HTTPStatus, text: str) -> None:
    """Send a response with one line of text."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
