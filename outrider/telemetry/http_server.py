"""HTTP/1 server for probes and scrapes, with a limited number and lifetime of connections.

One request per connection, without a body. When there are too many connections, the oldest is closed, so that idle
clients do not block others. The handler is a parameter.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
WITHIN_S = 5.0
"""How long a request may take to arrive, and as long its response to leave."""
_LINE_LIMIT_BYTES = 8 << 10
_MAX_HEADERS = 100


@dataclass(frozen=True, slots=True)
class Request:
    """A request."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


Answer = Callable[[Request], Awaitable[Response]]


class HttpServer:
    """Server on the running event loop."""

    def __init__(self, answer: Answer, *, max_connections: int = MAX_CONNECTIONS, within_s: float = WITHIN_S) -> None:
        self._answer = answer
        self._max_connections, self._within_s = max_connections, within_s
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self.port = 0
        """Address on which it listens, with the port that was chosen for port 0."""

    async def start(
        self, host: str | None = None, port: int | None = None, *, sock: socket.socket | None = None
    ) -> None:
        """Listen at an address or on a bound socket; ``OSError`` if that fails."""
        self._server = await asyncio.start_server(self._accept, host, port, sock=sock, limit=_LINE_LIMIT_BYTES)
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            self._end(task)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._connections) >= self._max_connections:
            self._end(next(iter(self._connections)))
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    def _end(self, task: asyncio.Task[None]) -> None:
        writer = self._connections.pop(task)
        task.cancel()
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                request = await _read_request(reader)
            response = await self._answered(request)
            async with asyncio.timeout(self._within_s):
                writer.write(_encode(request.method, response))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("a request over HTTP was not understood: %s", error)
            writer.transport.abort()

    async def _answered(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except Exception as error:
            _log.warning("a request for %s failed: %s: %s", request.path, type(error).__name__, error)
            return text_response(HTTPStatus.INTERNAL_SERVER_ERROR, "failed")


def text_response(status: HTTPStatus, text: str) -> Response:
    """A response with one line of text."""
    headers = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))
    return Response(status.value, headers, f"{text}\n".encode())


async def _read_request(reader: asyncio.StreamReader) -> Request:
    """A request's line and headers; ``ValueError`` for what is no HTTP request."""
    words = (await reader.readuntil(b"\r\n")).decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("no request of HTTP/1")
    path, _, query = words[1].partition("?")
    headers: list[tuple[str, str]] = []
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        if len(headers) == _MAX_HEADERS:
            raise ValueError("too many headers")
        name, _, value = line.decode("latin-1").partition(":")
        headers.append((name.strip().lower(), value.strip()))
    return Request(words[0], path, query, tuple(headers))


def _encode(method: str, response: Response) -> bytes:
    fixed = (("Content-Length", str(len(response.body))), ("Connection", "close"))
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in (*response.headers, *fixed)]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head if method == "HEAD" else head + response.body
