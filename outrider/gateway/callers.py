"""The caller's API key, forwarded to the coordinator if the gateway has no tokens."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_SCHEME = "bearer "
_key: ContextVar[str | None] = ContextVar("outrider_api_key", default=None)
"""Of the request that this task serves."""


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
