"""Health over HTTP, for probes that speak no gRPC or no TLS: ``/livez``, ``/readyz`` and ``/startupz``.

Says what the gRPC health of the same server says, and nothing else: 200 or 503 with one word. Live from start to end,
whatever happens elsewhere or while it drains; ready while serving; started once it has served. Without TLS and tokens,
since it tells nothing that is not public.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from http import HTTPStatus

from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.errors import ConfigError

_log = logging.getLogger(__name__)
_READ_WITHIN_S = 5.0
_LINE_LIMIT_BYTES = 8 << 10
_MAX_HEADERS = 100


@dataclass(frozen=True, slots=True)
class Probes:
    """Where health is told over HTTP."""

    host: str
    port: int

    @classmethod
    def of(cls, settings: TargetSettings | DraftSettings | CoordinatorSettings) -> Probes | None:
        """As the settings say; None for nowhere."""
        if settings.health_port is None:
            return None
        host = "127.0.0.1" if settings.host.startswith("unix:") else settings.host
        return cls(settings.health_host or host, settings.health_port)


class HttpHealth:
    """A listening socket that answers probes."""

    def __init__(self) -> None:
        self.port = 0
        """Where it listens, with the port that was chosen when 0 was asked for."""
        self._is_serving = self._has_served = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; ``ConfigError`` when the port is taken or the host is none of this machine."""
        try:
            self._server = await asyncio.start_server(self._serve, host.strip("[]"), port, limit=_LINE_LIMIT_BYTES)
        except OSError as error:
            raise ConfigError("health_port", f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port = int(self._server.sockets[0].getsockname()[1])

    def set_serving(self, serving: bool) -> None:
        """What ``/readyz`` says from now on."""
        self._is_serving = serving
        self._has_served = self._has_served or serving

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                method, path = await _read_request(reader)
                writer.write(_response(method, *self._answer(method, path)))
                await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            _log.debug("a health probe was not understood: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, method: str, path: str) -> tuple[HTTPStatus, str]:
        states = {"/livez": True, "/readyz": self._is_serving, "/startupz": self._has_served}
        if path not in states:
            return HTTPStatus.NOT_FOUND, f"there are {', '.join(states)}"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD"
        return (HTTPStatus.OK, "ok") if states[path] else (HTTPStatus.SERVICE_UNAVAILABLE, "not yet or no more")


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Method and path, without the query; ``ValueError`` for what is no HTTP request."""
    words = (await reader.readuntil(b"\r\n")).decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("no request of HTTP/1")
    for _ in range(_MAX_HEADERS):
        if await reader.readuntil(b"\r\n") == b"\r\n":
            return words[0], words[1].partition("?")[0]
    raise ValueError("too many headers")


def _response(method: str, status: HTTPStatus, text: str) -> bytes:
    body = f"{text}\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\nCache-Control: no-store\r\n\r\n"
    )
    return (head if method == "HEAD" else head + body).encode()
