"""Request bodies: JSON up to a maximum size."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request


async def read_json(request: Request, *, max_bytes: int) -> bytes:
    """Read the body; ``HTTPException`` for another content type, or for too many bytes.

    A page of another site cannot send JSON without a CORS preflight request, which the server does not answer.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type must be application/json, not {kind!r}")
    too_large = HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {max_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
