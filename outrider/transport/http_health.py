"""Health over HTTP, for probes without gRPC or TLS: ``/livez``, ``/readyz`` and ``/startupz``.

Serves the gRPC health of the same server as 200 or 503 with one word. Live until the process itself has failed, also
during a drain; ready while SERVING; started after the first SERVING. Uses neither TLS nor tokens, since all of it is
public.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from outrider.addresses import listening_error, listening_socket
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.errors import ConfigError, install_command

if TYPE_CHECKING:
    from outrider.telemetry.http_server import HttpServer, Message, Receive, Send


@dataclass(frozen=True, slots=True)
class Probes:
    """Address of the health port."""

    host: str
    port: int

    @classmethod
    def of(cls, settings: TargetSettings | DraftSettings | CoordinatorSettings) -> Probes | None:
        """The address from the settings; None without a port."""
        if settings.health_port is None:
            return None
        host = "127.0.0.1" if settings.host.startswith("unix:") else settings.host
        return cls(settings.health_host or host, settings.health_port)


class HttpHealth:
    """Server of the probes."""

    def __init__(self) -> None:
        self._is_serving = self._has_served = False
        self._is_alive = True
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port on which it listens, also if 0 was requested; 0: it does not listen."""
        return 0 if self._server is None else self._server.port

    async def start(self, host: str, port: int) -> None:
        """Listen; ``ConfigError`` if the port is in use, the host is not local or uvicorn is not installed."""
        try:
            from outrider.telemetry.http_server import HttpServer
        except ImportError as error:
            needed = f"needs {error.name}, which is not installed: {install_command('coordinator')}"
            raise ConfigError("health_port", needed) from error
        try:
            listener = listening_socket(host, port)
        except OSError as error:
            raise listening_error(host, port, error, port_setting="health_port", host_setting="health_host") from error
        self._server = HttpServer(self._respond)
        await self._server.start(listener)

    def set_serving(self, serving: bool) -> None:
        """Set the state of ``/readyz``."""
        self._is_serving = serving
        self._has_served = self._has_served or serving

    def fail(self) -> None:
        """The process has failed: ``/livez`` says so from now on."""
        self._is_alive = False

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _respond(self, scope: Message, receive: Receive, send: Send) -> None:
        from outrider.telemetry.http_server import send_text

        await send_text(send, *self._answer(scope["method"], scope["path"]))

    def _answer(self, method: str, path: str) -> tuple[HTTPStatus, str]:
        states = {"/livez": self._is_alive, "/readyz": self._is_serving, "/startupz": self._has_served}
        if path not in states:
            return HTTPStatus.NOT_FOUND, f"unknown path; known: {', '.join(states)}"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD"
        return (HTTPStatus.OK, "ok") if states[path] else (HTTPStatus.SERVICE_UNAVAILABLE, "not serving")
