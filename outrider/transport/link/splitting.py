"""Splitting of link messages that exceed the size limit.

The parts of a batch of events or commands have the same meaning one after the other. A single event that is too long
becomes the failure of its session; other sessions are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.errors import InvalidRequestError
from outrider.limits import LINK_COMMANDS
from outrider.transport.convert.columns import NUMBERS_IN_A_TIMING
from outrider.v1 import link_pb2 as pb

EventsT = TypeVar("EventsT", pb.DraftEvents, pb.TargetEvents)
CommandT = TypeVar("CommandT")
MessageT = TypeVar("MessageT")

_ROOM_BYTES = 1024
"""Kept for the report and for the lengths of the parts."""


@dataclass(frozen=True, slots=True)
class SplitEvents(Generic[EventsT]):
    """A batch split into messages."""

    messages: tuple[EventsT, ...]
    failed: tuple[tuple[int, int], ...] = ()
    """(session, generation) of the answers that were too long and are failures now."""


def split_events(message: EventsT, max_bytes: int) -> SplitEvents[EventsT]:
    """The events in order, in messages of at most ``max_bytes``, each with the report of the forward."""
    if message.ByteSize() <= max_bytes:
        return SplitEvents((message,))
    failed: list[tuple[int, int]] = []
    parts: list[EventsT] = []
    left = 0
    for index, event in enumerate(message.events):
        num_bytes = event.ByteSize() + _ROOM_BYTES
        if num_bytes > max_bytes:
            failed.append(_fail(event, max_bytes))
            num_bytes = event.ByteSize() + _ROOM_BYTES
        if num_bytes > left:
            parts.append(_empty_like(message))
            left = max_bytes
        parts[-1].events.append(event)
        start = NUMBERS_IN_A_TIMING * index
        parts[-1].item_timings_ns.extend(message.item_timings_ns[start : start + NUMBERS_IN_A_TIMING])
        left -= num_bytes
    return SplitEvents(tuple(parts), tuple(failed))


def split_commands(
    commands: Sequence[CommandT], encode: Callable[[Sequence[CommandT]], MessageT], max_bytes: int
) -> list[MessageT]:
    """The commands in order, in messages of at most ``max_bytes``; a single command is sent whatever its length."""
    if len(commands) <= LINK_COMMANDS.most:
        message: Any = encode(commands)
        if len(commands) < 2 or message.ByteSize() <= max_bytes:
            return [message]
    middle = len(commands) // 2
    return [
        *split_commands(commands[:middle], encode, max_bytes),
        *split_commands(commands[middle:], encode, max_bytes),
    ]


def _empty_like(message: EventsT) -> EventsT:
    return type(message)(report=message.report if message.HasField("report") else None)


def _fail(event: Any, max_bytes: int) -> tuple[int, int]:  # noqa: ANN401 - generated types share no base
    """Turn an event into its session's failure."""
    answer = getattr(event, event.WhichOneof("event"))
    field, advice = _too_long_because(answer)
    found = f"the answer takes {answer.ByteSize()} bytes, more than the {max_bytes} of a message; {advice}"
    error = InvalidRequestError(field, found)
    failure = pb.SessionFailed(session=answer.session, generation=answer.generation, code=type(error).__name__)
    failure.message, failure.field = str(error), error.field
    event.session_failed.CopyFrom(failure)
    return failure.session, failure.generation


def _too_long_because(answer: Any) -> tuple[str, str]:  # noqa: ANN401 - generated types share no base
    if getattr(answer, "prompt_logprobs", ()):
        return "prompt_logprobs", "ask for fewer, or with a shorter prompt"
    if getattr(answer, "logprobs", ()):
        return "logprobs", "ask for fewer"
    return "num_speculative_tokens", "ask for fewer, or without dense evidence"
