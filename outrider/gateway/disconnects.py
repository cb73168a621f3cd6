"""Client disconnects: the work for a request is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

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
