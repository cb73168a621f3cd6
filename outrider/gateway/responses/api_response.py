"""Common parts of completion and chat responses: whole, or as server-sent events."""

from __future__ import annotations

import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any

from outrider.errors import OutriderError
from outrider.gateway.generations import GenerationChoice
from outrider.gateway.responses.error_responses import error_body
from outrider.generation import Delta, GenerationResult

_log = logging.getLogger(__name__)

# Made once: ``json.dumps`` with options makes an encoder for each call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":")).encode

Json = dict[str, Any]


class ApiResponse(ABC):
    """A response in progress."""

    ending = b"data: [DONE]\n\n"
    """End of a stream."""

    @abstractmethod
    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The whole response."""

    @abstractmethod
    def events(self, choice: GenerationChoice, delta: Delta) -> Iterable[Json]:
        """The events of a delta; may be empty."""

    @abstractmethod
    def last_events(self) -> Iterable[Json]:
        """The events after the last delta."""

    @abstractmethod
    def translated(self, error: OutriderError) -> OutriderError:
        """An error with the field names of the request."""

    def failure(self, error: Exception) -> Json:
        """The event of an error."""
        return error_body(self.translated(error) if isinstance(error, OutriderError) else error)

    def encode(self, events: Iterable[Json]) -> bytes:
        """Server-sent events. JSON contains no line breaks, so each event is one ``data`` line."""
        return b"".join(b"data: " + encode_json(event) + b"\n\n" for event in events)


async def event_stream(
    answer: ApiResponse,
    deltas: AsyncGenerator[tuple[GenerationChoice, Delta], None],
    first: tuple[GenerationChoice, Delta] | None,
) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first event is sent as the last event."""
    try:
        async with contextlib.aclosing(deltas):
            if first is not None:
                yield answer.encode(answer.events(*first))
            async for choice, delta in deltas:
                if events := answer.encode(answer.events(choice, delta)):
                    yield events
        yield answer.encode(answer.last_events())
    except OutriderError as error:
        _log.warning("a stream ended early: %s", error)
        yield answer.encode([answer.failure(error)])
    except Exception as error:
        _log.exception("a stream ended early")
        yield answer.encode([answer.failure(error)])
    yield answer.ending


def encode_json(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate is escaped."""
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:
        return _encode_ascii(value).encode()
