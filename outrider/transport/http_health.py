"""Health over HTTP, for probes that speak no gRPC or no TLS: ``/livez``, ``/readyz`` and ``/startupz``.

Says what the gRPC health of the same server says, and nothing else: 200 or 503 with one word. Live from start to end,
whatever happens elsewhere or while it drains; ready while serving; started once it has served. Without TLS and tokens,
since it tells nothing that is not public.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.errors import ConfigError
from outrider.telemetry.http_server import HttpServer, Request, Response, text_response


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
        self._is_serving = self._has_served = False
        self._server = HttpServer(self._respond)

    @property
    def port(self) -> int:
        """Where it listens, with the port that was chosen when 0 was asked for; 0: nowhere."""
        return self._server.port

    async def start(self, host: str, port: int) -> None:
        """Listen; ``ConfigError`` when the port is taken or the host is none of this machine."""
        try:
            await self._server.start(host.strip("[]"), port)
        except OSError as error:
            raise ConfigError("health_port", f"cannot listen on {host}:{port}: {error.strerror or error}") from error

    def set_serving(self, serving: bool) -> None:
        """What ``/readyz`` says from now on."""
        self._is_serving = serving
        self._has_served = self._has_served or serving

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    async def _respond(self, request: Request) -> Response:
        return text_response(*self._answer(request.method, request.path))

    def _answer(self, method: str, path: str) -> tuple[HTTPStatus, str]:
        states = {"/livez": True, "/readyz": self._is_serving, "/startupz": self._has_served}
        if path not in states:
            return HTTPStatus.NOT_FOUND, f"there are {', '.join(states)}"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD"
        return (HTTPStatus.OK, "ok") if states[path] else (HTTPStatus.SERVICE_UNAVAILABLE, "not yet or no more")
