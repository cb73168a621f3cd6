"""Request bodies: JSON up to a maximum size, of one and of all that are read at the same time; client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import CapacityError
from outrider.gateway.responses.error_responses import shortened
from outrider.open_requests import HeldBytes, OpenRequests

_HELD = "held_bytes"
"""Key of the request's state."""


class CountedBodies:
    """Middleware that counts the bytes that are held of each request until its answer has ended."""

    def __init__(self, app: ASGIApp, open_requests: OpenRequests) -> None:
        self._app, self._open_requests = app, open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        with self._open_requests.entered() as held:
            scope.setdefault("state", {})[_HELD] = held
            await self._app(scope, receive, send)


def held_bytes(request: Request) -> HeldBytes:
    """The bytes that are held of a request."""
    held: HeldBytes = getattr(request.state, _HELD)
    return held


async def read_json(request: Request, *, max_bytes: int) -> bytes:
    """Read the body; ``HTTPException`` for another content type, or for too many bytes; ``CapacityError`` while
    too much is held of others.

    A page of another site cannot send JSON without a CORS preflight request, which the server does not answer.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type must be application/json, not {kind!r}")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"content-encoding must be identity, not {shortened(coding)!r}: bodies are not decompressed",
            {"accept-encoding": "identity"},
        )
    too_large = HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {max_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    refusal: CapacityError | None = None
    num_bytes, held = 0, held_bytes(request)
    async for part in _parts_of(request):
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large
        if refusal is not None:
            continue  # a client reads no answer while it writes
        try:
            held.take(len(part))
        except CapacityError as error:
            refusal = error
            parts.clear()
            held.release()
        else:
            parts.append(part)
    if refusal is not None:
        raise refusal
    return b"".join(parts)


async def _parts_of(request: Request) -> AsyncGenerator[bytes, None]:
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect as error:
        raise ClientGoneError from error


ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """The client has disconnected."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the work's result; cancel it and raise ``ClientGoneError`` if the client disconnects.

    The request's body must have been read: after it, the only message is the end of the connection.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
