"""``GET /metrics`` on the port of HTTP: the metrics of this gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.config import GatewaySettings
from outrider.errors import install_command
from outrider.readings import Reading


class MetricsPage:
    """ASGI application of the page; 404 without the library that writes it."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        """``read`` is called on the event loop."""
        self._read = read
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One scrape."""
        if self._app is None:
            self._app = self._make_app()
        await self._app(scope, receive, send)

    def _make_app(self) -> ASGIApp:
        try:
            from outrider.telemetry.metrics.endpoint import make_metrics_app
        except ImportError:
            problem = f"metrics need prometheus-client, which is not installed: {install_command('telemetry')}"
            raise HTTPException(HTTPStatus.NOT_FOUND, problem) from None
        app: ASGIApp = make_metrics_app(self._read, role=GatewaySettings.name)
        return app
