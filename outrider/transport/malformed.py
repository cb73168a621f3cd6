"""Malformed requests: an ``InvalidRequestError`` in the handler for bytes that cannot be parsed.

For an exception in a deserializer gRPC answers UNKNOWN and logs a traceback. Here the deserializer returns a marker,
for which the wrapper of the handler raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Malformed:
    """Marker of a message that could not be parsed, or has too many fields."""

    error: InvalidRequestError


def malformed(data: bytes) -> InvalidRequestError:
    """The error of bytes that cannot be parsed."""
    return InvalidRequestError("request", f"its {len(data)} bytes are no message of this method's type")


def tolerant(
    deserialize: Callable[[bytes], Any] | None, check: Callable[[bytes], None] | None = None
) -> Callable[[bytes], Any] | None:
    """The deserializer, returning ``Malformed`` for bytes that it cannot parse, or for which ``check`` raises."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:  # noqa: ANN401 - generated messages share no base
        try:
            if check is not None:
                check(data)
            return deserialize(data)
        except InvalidRequestError as error:
            return Malformed(error)
        except (DecodeError, ValueError):  # protobuf's pure Python form raises both
            return Malformed(malformed(data))

    return parse


def well_formed(request: Any) -> Any:  # noqa: ANN401
    """A message, or a stream of messages, that raises ``InvalidRequestError`` for ``Malformed``."""
    if isinstance(request, Malformed):
        raise request.error
    return _well_formed_stream(request) if hasattr(request, "__aiter__") else request


async def _well_formed_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error
        yield request
