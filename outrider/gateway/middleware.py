"""Middleware of every request: the root path, the request id and the check of the API key.

Plain ASGI, so streams pass unchanged.
"""

from __future__ import annotations

import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import UnauthenticatedError
from outrider.gateway.callers import bearer_key
from outrider.gateway.responses.error_responses import API_KEY, error_body, error_headers, error_status
from outrider.transport.security import TokenFile

REQUEST_ID = "x-request-id"
_MAX_ID_CHARACTERS = 128
_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What probes ask for."""


class RootPath:
    """Takes a prefix off the path of each request that has it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        await self._app(scope, receive, send)


class RequestIds:
    """Sets the id of each request, or uses the one it has, and returns it as a header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _valid_id(Headers(scope=scope).get(REQUEST_ID, ""))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id or scope["state"].get("made_id") or _new_id()
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Refuses requests without a token of the file, like the coordinator over gRPC."""

    def __init__(self, app: ASGIApp, tokens: TokenFile) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = UnauthenticatedError(API_KEY)
        response = JSONResponse(error_body(error), error_status(error), error_headers(error))
        await response(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        key = bearer_key(headers)
        return key is not None and self._tokens.accepts(key)


def request_name(state: Any, wanted: str | None) -> str:  # noqa: ANN401 - starlette's State
    """The request's id: from its header, its body, or new."""
    name: str = state.request_id or _valid_id(wanted or "") or _new_id()
    state.made_id = name
    return name


def _new_id() -> str:
    return uuid.uuid4().hex


def _valid_id(given: str) -> str:
    """What a header can carry and a log can show; anything else counts as none."""
    is_fit = 0 < len(given) <= _MAX_ID_CHARACTERS and given.isascii() and given.isprintable()
    return given if is_fit else ""
