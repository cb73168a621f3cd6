"""Common parts of completion and chat responses: whole, or as server-sent events."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from outrider.errors import OutriderError
from outrider.gateway.generations import Choice
from outrider.gateway.responses.error_responses import error_body
from outrider.generation import Delta, GenerationResult

_log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"

# Made once: ``json.dumps`` with options makes an encoder for each call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":")).encode

Json = dict[str, Any]


class Answer(Protocol):
    """A response in progress."""

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The whole response."""

    def events(self, choice: Choice, delta: Delta) -> Iterable[Json]:
        """The events of a delta; may be empty."""

    def last_events(self) -> Iterable[Json]:
        """The events after the last delta."""

    def translated(self, error: OutriderError) -> OutriderError:
        """An error with the field names of the request."""


async def event_stream(
    answer: Answer, deltas: AsyncGenerator[tuple[Choice, Delta], None], first: tuple[Choice, Delta] | None
) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first event is sent as the last event."""
    try:
        async with contextlib.aclosing(deltas):
            if first is not None:
                yield encode_events(answer.events(*first))
            async for choice, delta in deltas:
                if events := encode_events(answer.events(choice, delta)):
                    yield events
        yield encode_events(answer.last_events())
    except OutriderError as error:
        _log.warning("a stream ended early: %s", error)
        yield encode_events([error_body(answer.translated(error))])
    except Exception as error:
        _log.exception("a stream ended early")
        yield encode_events([error_body(error)])
    yield _DONE


def encode_events(events: Iterable[Json]) -> bytes:
    """Encode events. JSON contains no line breaks, so each event is one ``data`` line."""
    return b"".join(b"data: " + encode_json(event) + b"\n\n" for event in events)


def encode_json(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate is escaped."""
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:
        return _encode_ascii(value).encode()
