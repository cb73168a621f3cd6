"""Splitting of link messages that exceed the size limit.

The parts of a batch of events or commands have the same meaning one after the other. A single event that is too long
becomes the failure of its session; other sessions are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.batched import num_items, one_by_one
from outrider.errors import InvalidRequestError
from outrider.limits import LINK_COMMANDS
from outrider.transport.convert.packed_arrays import SESSION_BYTES
from outrider.transport.convert.step_answers import proposals_from_proto, scores_from_proto, write_step_answers
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
    events = [part for event in message.events for part in _cut(event, max_bytes - _ROOM_BYTES)]
    for event in events:
        num_bytes = event.ByteSize() + _ROOM_BYTES
        if num_bytes > max_bytes:
            failed.append(_fail(event, max_bytes))
            num_bytes = event.ByteSize() + _ROOM_BYTES
        if num_bytes > left:
            parts.append(_empty_like(message))
            left = max_bytes
        parts[-1].events.append(event)
        left -= num_bytes
    return SplitEvents(tuple(parts), tuple(failed))


def _cut(event: Any, max_bytes: int) -> list[Any]:  # noqa: ANN401 - generated types share no base
    """Answers in parts of at most ``max_bytes``, or of one row; any other event as it is."""
    num_rows = len(event.answers.sessions) // SESSION_BYTES
    if num_rows < 2 or event.ByteSize() <= max_bytes:
        return [event]
    read = proposals_from_proto if isinstance(event, pb.DraftEvent) else scores_from_proto
    batched, parts = read(event.answers), []
    for indices in np.array_split(np.arange(num_rows), 2):
        part = type(event)()
        write_step_answers(part.answers, batched.selected(indices))
        parts += _cut(part, max_bytes)
    return parts


def split_commands(
    commands: Sequence[CommandT], encode: Callable[[Sequence[CommandT]], MessageT], max_bytes: int
) -> list[MessageT]:
    """The commands in order, in messages of at most ``max_bytes``; a single command is sent whatever its length."""
    if num_items(commands) <= LINK_COMMANDS.most:
        message: Any = encode(commands)
        if message.ByteSize() <= max_bytes:
            return [message]
        commands = one_by_one(commands)
        if len(commands) < 2:
            return [message]
    middle = len(commands) // 2
    return [
        *split_commands(commands[:middle], encode, max_bytes),
        *split_commands(commands[middle:], encode, max_bytes),
    ]


def _empty_like(message: EventsT) -> EventsT:
    return type(message)(report=message.report if message.HasField("report") else None)


def _fail(event: Any, max_bytes: int) -> tuple[int, int]:  # noqa: ANN401 - generated types share no base
    """Turn an event of one session into the session's failure."""
    answer = getattr(event, event.WhichOneof("event"))
    if isinstance(answer, pb.StepAnswers):
        session, generation = (int.from_bytes(column, "little") for column in (answer.sessions, answer.generations))
    else:
        session, generation = answer.session, answer.generation
    field, advice = _too_long_because(answer)
    found = f"the answer takes {answer.ByteSize()} bytes, more than the {max_bytes} of a message; {advice}"
    error = InvalidRequestError(field, found)
    failure = pb.SessionFailed(session=session, generation=generation, code=type(error).__name__)
    failure.message, failure.field = str(error), error.field
    event.session_failed.CopyFrom(failure)
    return failure.session, failure.generation


def _too_long_because(answer: Any) -> tuple[str, str]:  # noqa: ANN401 - generated types share no base
    for name, advice in (("prompt_logprobs", "ask for fewer, or with a shorter prompt"), ("logprobs", "ask for fewer")):
        if isinstance(answer, pb.StepAnswers) and answer.details.HasField(name):
            return name, advice
    return "num_speculative_tokens", "ask for fewer"
