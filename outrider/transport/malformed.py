"""Malformed requests: an ``InvalidRequestError`` in the handler for bytes that cannot be parsed.

For an exception in a deserializer gRPC answers UNKNOWN and logs a traceback. Here the deserializer returns a marker,
for which the wrapper of the handler raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from outrider.cooperative import Work, run_in_slices
from outrider.errors import InvalidRequestError
from outrider.limits import LINK_FIELDS, Bound
from outrider.transport.field_counts import counting_fields, may_have_more

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Marker of a message that could not be parsed, or has too many fields."""

    error: InvalidRequestError


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Marker of a message whose fields take long to count."""

    data: bytes
    deserialize: Callable[[bytes], Any]
    checking: Callable[[bytes], Work[None]]

    async def read(self) -> Any:  # noqa: ANN401 - generated messages share no base
        """Return the message, or ``Malformed``; other tasks run while it is checked."""
        try:
            await run_in_slices(self.checking(self.data))
        except InvalidRequestError as error:
            return Malformed(error)
        return tolerant(self.deserialize)(self.data)


async def checked(message: Any) -> Any:  # noqa: ANN401
    """A message or its ``Malformed``; one that is ``Unchecked`` is checked and parsed."""
    return await message.read() if isinstance(message, Unchecked) else message


def malformed(data: bytes) -> InvalidRequestError:
    """The error of bytes that cannot be parsed."""
    return InvalidRequestError("request", f"its {len(data)} bytes are no message of this method's type")


def tolerant(
    deserialize: Callable[[bytes], Any], check: Callable[[bytes], None] | None = None
) -> Callable[[bytes], Any]:
    """The deserializer, returning ``Malformed`` for bytes that it cannot parse, or for which ``check`` raises."""

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


def tolerant_of_link(
    deserialize: Callable[[bytes], Any],
    message: Any,  # noqa: ANN401 - descriptors have several types
    most_items: Bound,
) -> Callable[[bytes], Any]:
    """The deserializer of a link's messages, of which it returns large ones as ``Unchecked``.

    ``most_items``: commands or events in one message.
    """
    checking = partial(counting_fields, message=message, most=LINK_FIELDS, most_items=most_items)
    parse = tolerant(deserialize)

    def parse_or_mark(data: bytes) -> Any:  # noqa: ANN401
        return Unchecked(data, deserialize, checking) if may_have_more(data, LINK_FIELDS) else parse(data)

    return parse_or_mark


def well_formed(request: Any) -> Any:  # noqa: ANN401
    """A message, or a stream of messages, that raises ``InvalidRequestError`` for ``Malformed``."""
    if isinstance(request, Malformed):
        raise request.error
    return _well_formed_stream(request) if hasattr(request, "__aiter__") else request


async def _well_formed_stream(requests: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    received_ones = aiter(requests)
    try:
        async for received in received_ones:
            request = await checked(received)
            del received
            if isinstance(request, Malformed):
                raise request.error
            yield request
    finally:
        await end_stream(received_ones)


async def only_message(requests: AsyncIterator[MessageT]) -> MessageT:
    """The message of a stream of one, which is closed; ``InvalidRequestError`` if none comes."""
    try:
        async for message in requests:
            return message
    finally:
        await end_stream(requests)
    raise InvalidRequestError("request", "must be sent; the call has ended without a message")


async def end_stream(requests: Any) -> None:  # noqa: ANN401 - any stream of messages, or one message
    """Close a stream that is not read any more: gRPC's holds its last message, and itself, until the collector comes
    by, which few objects of many megabytes do not make it do.
    """
    if isinstance(requests, AsyncGenerator):
        with contextlib.suppress(RuntimeError):  # a task that was cancelled twice still reads it
            await requests.aclose()
