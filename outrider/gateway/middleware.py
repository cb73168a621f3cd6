"""Middleware of every request: the check of its headers, the root path, the request id, the check of the API
key, and the caller's key for calls to the coordinator.

Plain ASGI, so streams pass unchanged.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import UnauthenticatedError
from outrider.gateway.responses.error_responses import API_KEY, error_body, error_headers, error_status, make_error_body
from outrider.transport.security import TokenFile

REQUEST_ID = "x-request-id"
MISSPELLED = "x-outrider-misspelled-fields"
"""Header with unknown fields of a request that nearly have the name of a known one."""
CACHE_SALT = "cache_salt"
"""Key of the request's state: the cache salt of its API key."""
_MAX_ID_CHARACTERS = 128
_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Paths of probes."""


_SINGLE_HEADERS = ("host", "authorization", "content-type", "content-length")
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class RequestHeaders:
    """Refuses requests with headers that a server and a proxy before it could read in two ways: a ``Host`` that is
    missing or not a name, a second ``Host`` or ``Authorization``, a transfer coding besides ``chunked``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refusal = _refusal(Headers(scope=scope), scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)


def _refusal(headers: Headers, scope: Scope) -> JSONResponse | None:
    """The response to a request with headers that are not accepted; None for other requests."""
    for name in _SINGLE_HEADERS:
        if len(headers.getlist(name)) > 1:
            return _refused(HTTPStatus.BAD_REQUEST, f"there is more than one header {name}; send one")
    if "host" not in headers and scope.get("http_version") == "1.1":
        return _refused(HTTPStatus.BAD_REQUEST, "the header host is missing, which HTTP/1.1 requires")
    if not _HOST.fullmatch(headers.get("host", "")):
        return _refused(HTTPStatus.BAD_REQUEST, "the header host is not a host name with an optional port")
    codings = ", ".join(headers.getlist("transfer-encoding")).strip().lower()
    if codings not in ("", "chunked"):
        return _refused(HTTPStatus.NOT_IMPLEMENTED, "the only transfer-encoding that is accepted is chunked")
    return None


def _refused(status: HTTPStatus, message: str) -> JSONResponse:
    return JSONResponse(make_error_body(status, message), status, {"connection": "close"})


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
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id or scope["state"].get("made_id") or _new_id()
                if (misspelled := scope["state"].get(MISSPELLED)) is not None:
                    headers[MISSPELLED] = misspelled
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Refuses requests without a token of the file, like the coordinator over gRPC."""

    def __init__(self, app: ASGIApp, tokens: TokenFile) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = UnauthenticatedError(API_KEY)
        response = JSONResponse(error_body(error), error_status(error), error_headers(error))
        await response(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        key = bearer_key(Headers(scope=scope))
        if key is None or not self._tokens.accepts(key):
            return False
        scope.setdefault("state", {})[CACHE_SALT] = self._tokens.cache_salt(key)
        return True


def request_name(state: Any, wanted: str | None) -> str:  # noqa: ANN401 - starlette's State
    """The request's id: from its header, its body, or new."""
    name: str = state.request_id or _valid_id(wanted or "") or _new_id()
    state.made_id = name
    return name


def note_misspelled(state: Any, fields: Mapping[str, str]) -> str:  # noqa: ANN401 - starlette's State
    """Name unknown fields of the request and the known ones that they resemble in a header, whose value is returned."""
    suggestions = ", ".join(f"{ascii(given)[1:-1]} (did you mean {known}?)" for given, known in fields.items())
    setattr(state, MISSPELLED, suggestions)
    return suggestions


def _new_id() -> str:
    return uuid.uuid4().hex


def _valid_id(given: str) -> str:
    """Id that a header can carry and a log can show; empty for any other."""
    is_fit = 0 < len(given) <= _MAX_ID_CHARACTERS and given.isascii() and given.isprintable()
    return given if is_fit else ""


_SCHEME = "bearer "
_key: ContextVar[str | None] = ContextVar("outrider_api_key", default=None)
"""API key of the request that this task serves."""


def caller_key() -> str | None:
    """The key of the current request; None without one, or outside of a request."""
    return _key.get()


def bearer_key(headers: Headers) -> str | None:
    """The key of an ``Authorization: Bearer`` header, if gRPC metadata can carry it."""
    given = headers.get("authorization", "")
    key = given[len(_SCHEME) :].strip() if given[: len(_SCHEME)].lower() == _SCHEME else ""
    return key if key and key.isascii() and key.isprintable() and " " not in key else None


class CallerKeys:
    """Middleware that stores each request's key for its calls to the coordinator."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, which runs in a task of its own."""
        if scope["type"] == "http":
            _key.set(bearer_key(Headers(scope=scope)))
        await self._app(scope, receive, send)
