"""The ASGI application: routes, error handlers and the page of metrics."""

from __future__ import annotations

import difflib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.config import GatewaySettings
from outrider.errors import OutriderError, install_command
from outrider.gateway.bodies import ClientGoneError, CountedBodies
from outrider.gateway.endpoints import Endpoints
from outrider.gateway.middleware import (
    MISSPELLED,
    REQUEST_ID,
    ApiKeys,
    CallerKeys,
    RequestHeaders,
    RequestIds,
    RootPath,
)
from outrider.gateway.responses.error_responses import (
    error_body,
    error_headers,
    error_status,
    make_error_body,
    shortened,
    unserved_path,
)
from outrider.gateway.watching import HttpWatch, Watched
from outrider.limits import RateLimit
from outrider.readings import Reading
from outrider.transport.security import TokenFile

_log = logging.getLogger(__name__)
_WARNING_INTERVAL_S = 10.0
"""Interval of warnings of one kind, so that clients cannot fill the log."""
_CLIENT_GONE = 499
"""Status of proxies' logs for a client that disconnected; no client reads it."""


def make_app(
    endpoints: Endpoints,
    *,
    tokens: TokenFile | None = None,
    watch: HttpWatch | None = None,
    metrics: Callable[[], Iterable[Reading]] = tuple,
    settings: GatewaySettings | None = None,
) -> Starlette:
    """Build the application. ``tokens``: API keys, one of which each request must have; None requires none. ``watch``
    counts and traces each request. ``metrics``: readings for ``GET /metrics``. ``settings``: root path and origins of
    browsers' pages; None has neither.
    """
    before_keys = [Middleware(Watched, watch=watch)] if watch is not None else []
    before_keys += [Middleware(RequestIds), Middleware(RequestHeaders)]
    if settings is not None:
        before_keys = [*_root_path(settings), *before_keys, *_cross_origin(settings)]
    keys = [] if tokens is None else [Middleware(ApiKeys, tokens=tokens)]
    inner = [Middleware(CallerKeys), Middleware(CountedBodies, open_requests=endpoints.open_requests)]
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/responses", endpoints.responses, methods=["POST"]),
            Route("/v1/responses/{name:path}", endpoints.stored_response, methods=["GET", "POST", "DELETE"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/tokenize", endpoints.tokenize, methods=["POST"]),
            Route("/detokenize", endpoints.detokenize, methods=["POST"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/ping", endpoints.health, methods=["GET", "POST"]),
            Route("/metrics", MetricsPage(metrics), methods=["GET"]),
            Route("/version", endpoints.version, methods=["GET"]),
        ],
        middleware=[*before_keys, *keys, *inner],
        exception_handlers={
            OutriderError: _KnownErrors(),
            HTTPException: _on_http_error,
            ClientGoneError: _on_client_gone,
            Exception: _on_bug,
        },
    )


def _root_path(settings: GatewaySettings) -> list[Middleware]:
    return [] if settings.root_path is None else [Middleware(RootPath, prefix=settings.root_path)]


def _cross_origin(settings: GatewaySettings) -> list[Middleware]:
    """CORS middleware, before the check of keys: browsers send preflight requests without one."""
    origins, methods, headers = (
        [entry.strip() for entry in (given or "").split(",") if entry.strip()]
        for given in (settings.allowed_origins, settings.allowed_methods, settings.allowed_headers)
    )
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=[REQUEST_ID, MISSPELLED],
        )
    ]


class _KnownErrors:
    """Responses for known errors; those of the server are logged, of each kind one every ten seconds."""

    def __init__(self) -> None:
        self._limits: defaultdict[type[Exception], RateLimit] = defaultdict(lambda: RateLimit(_WARNING_INTERVAL_S))

    async def __call__(self, request: Request, error: Exception) -> JSONResponse:
        """The response to one request."""
        status = error_status(error)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._warn(request, error)
        return JSONResponse(error_body(error), status, error_headers(error))

    def _warn(self, request: Request, error: Exception) -> None:
        num_suppressed = self._limits[type(error)].take()
        if num_suppressed is not None:
            fields = {"fields": {"num_suppressed": num_suppressed}} if num_suppressed else {}
            _log.warning("%s %s: %s", request.method, shortened(request.url.path), error, extra=fields)


async def _on_http_error(request: Request, error: Any) -> JSONResponse:  # noqa: ANN401 - by its kind an HTTPException
    status = HTTPStatus(error.status_code)
    asked = f"{request.method} {shortened(request.url.path)}"
    message = f"{error.detail}: {asked}{_instead(request, error)}" if error.detail == status.phrase else error.detail
    return JSONResponse(make_error_body(status, message), status, error.headers)


def _instead(request: Request, error: Any) -> str:  # noqa: ANN401
    """The method, or the path, that was probably meant."""
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"; the method is {(error.headers or {}).get('Allow', '')}".rstrip()
    if (unserved := unserved_path(request.url.path)) is not None:
        return f"; {unserved}"
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    near = difflib.get_close_matches(shortened(request.url.path), paths, n=1, cutoff=0.75)
    if f"/v1{request.url.path}" in paths:
        near = [f"/v1{request.url.path}"]
    return f"; did you mean {near[0]}?" if near else "; docs/http.md lists what is served"


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again for the server's log.
    return JSONResponse(error_body(error), HTTPStatus.INTERNAL_SERVER_ERROR)


class MetricsPage:
    """``GET /metrics`` on the port of HTTP: the metrics of this gateway; 404 without the library that writes them."""

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
