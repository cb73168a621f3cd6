"""Answers of many sessions as arrays, and those whose commands have been sent: the rest of the step is to be done."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.batched import AnswerBatch, ExtendBatch
from outrider.errors import ProtocolError
from outrider.item_batch import batch_of_answers
from outrider.ports import EventBatch, ItemTiming, Proposal, Scores
from outrider.types import TokenLogprob
from outrider.values import step_value
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.services import DraftReplica, TargetReplica
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import DraftWaitBegan, StepEnded
from outrider_coordinator.session.logprobs import JointLogprobs
from outrider_coordinator.session.prepared import Prepared, Taken
from outrider_coordinator.session.state import REASONS
from outrider_coordinator.session.table import Ints
from outrider_coordinator.stats.request_timings import NANOSECONDS


def in_batch(batch: EventBatch[Any]) -> EventBatch[Any]:
    """The message with its single answers, which services of the same process may give, as arrays after those that it
    has. They stay events where the parts of one do not fit each other: each session says what is wrong.
    """
    answers = [one for one in batch.timed() if isinstance(one[0], Proposal | Scores)] if batch.events else ()
    if not answers:
        return batch
    timings = [timing for _, timing in answers if timing is not None]
    try:
        made = batch_of_answers([event for event, _ in answers], timings if len(timings) == len(answers) else ())
    except (ProtocolError, OverflowError):  # a negative token id does not fit a column
        return batch
    others = [one for one in batch.timed() if not isinstance(one[0], Proposal | Scores)]
    return EventBatch.of(others, batch.report, (*batch.batched, *made))


@step_value(frozen=True, slots=True)
class PreparedBatch:
    """Requests of one target and one draft, and what their sessions wait for."""

    prepared: Prepared
    requests: Sequence[RequestState]
    target: TargetReplica
    draft: DraftReplica | None


@dataclass
class TakenAnswers:
    """Answers whose commands were sent; the rest of the step is still to be done."""

    batch: PreparedBatch
    taken: Taken
    answers: AnswerBatch[Any]
    indices: Sequence[int]
    """Indices of what was taken, among all answers of the message's arrays."""
    arrived: float
    handled: float

    token_ids: list[list[int]] | None = None
    """New ones of a step that ended; None: not committed yet."""

    def commit(self) -> None:
        """Write the rows as they are from now on, once."""
        if self.token_ids is None:
            self.token_ids = self.taken.commit()

    def steps(self) -> Iterator[StepEnded]:
        """The steps that ended, without logprobs."""
        taken = self.taken
        if taken.num_tokens is not None and self.token_ids is not None:
            rows = self.batch.prepared.rows[taken.indices]
            numbers, bases = rows[:, col.STEP].tolist(), rows[:, col.LENGTH].tolist()
            counts = [counts.tolist() for counts in taken.num_tokens]
            reasons = [REASONS[index] for index in rows[:, col.REASON].tolist()]
            yield from map(StepEnded, numbers, bases, *counts, self.token_ids, reasons, self.timings)

    @functools.cached_property
    def _logprobs(self) -> JointLogprobs:
        return JointLogprobs(self.answers.logprobs, len(self.answers.sessions))

    def logprobs(self, place: int, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Logprobs of the new tokens of a request, which has asked for them; ``ProtocolError`` without any."""
        return self._logprobs.emitted(self.taken.indices[place], token_ids)

    @functools.cached_property
    def timings(self) -> list[ItemTiming | None]:
        """The services' own times, of each request."""
        return self.answers.timings(self.taken.indices)

    def trace(self, place: int, timing: ItemTiming | None, ended: StepEnded | None = None) -> None:
        """Note in the trace of a request that it was answered, and what was sent next. ``ended``: the step, after
        scores.
        """
        request, commands = self.requests[place], self.taken.commands
        notes = request.trace.notes
        if notes is None:
            return
        handled_ns, outcome = round(self.handled / NANOSECONDS), Proposal if ended is None else Scores
        notes.was_answered(outcome.__name__, timing, round(self.arrived / NANOSECONDS), is_draft=ended is None)
        if ended is not None:
            request.note_in_trace(ended, self.handled)
        is_drafting = isinstance(commands, ExtendBatch)
        if is_drafting:
            notes.take(DraftWaitBegan(request.loop.step), handled_ns)
        generation, kept = int(commands.generations[place]), int(commands.num_kept_tokens[place])
        notes.asked(generation, kept, int(commands.draft_lengths[place]), handled_ns, is_draft=is_drafting)

    @property
    def requests(self) -> Sequence[RequestState]:
        """Requests whose answers were taken."""
        indices, requests = self.taken.indices, self.batch.requests
        return requests if len(indices) == len(requests) else [requests[place] for place in indices]

    @property
    def index(self) -> Ints:
        """Rows of the requests."""
        indices, index = self.taken.indices, self.batch.prepared.index
        return index if len(indices) == len(index) else index[list(indices)]
