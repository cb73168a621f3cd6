"""Steady driver: the next commands of steady sessions leave first, and their state machines confirm them afterwards.

While the services compute, the sessions that wait for them are put into batches (``steady_batches``). An answer that
comes as columns is judged and answered from those. What was sent is confirmed when the commands have left, or before
anything else happens to any session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.columns import FEWEST_ROWS, AnswerColumns, ExtendColumns
from outrider.errors import IntegrityError
from outrider.ports import DraftEvent, EventBatch, Extend, Score, TargetEvent
from outrider.types import JudgingRule
from outrider_coordinator.acceptance import NextToken, Verdict
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.services import DraftReplica, TargetReplica
from outrider_coordinator.session import steady
from outrider_coordinator.session.actions import DraftWaitEnded
from outrider_coordinator.session.steady_batches import (
    AnsweredProposals,
    AnsweredScores,
    DraftingBatch,
    Places,
    PlainBatch,
    ScoringBatch,
)
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.request_timings import RequestTimings

_now = RequestTimings.now
_DRAFTED: tuple[type[DraftingBatch | ScoringBatch], ...] = (DraftingBatch, ScoringBatch)

BatchT = TypeVar("BatchT", DraftingBatch, ScoringBatch | PlainBatch)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[BatchT]):
    """A batch, its requests, and where they live."""

    batch: BatchT
    requests: Sequence[RequestState]
    target: TargetReplica
    draft: DraftReplica | None
    """None with a ``PlainBatch`` alone."""


_Places = dict[int, tuple[_Waiting[BatchT], int]]
"""Batch and row of each session."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Answers whose commands were sent, to be confirmed."""

    waiting: _Waiting[Any]
    taken: AnsweredProposals | AnsweredScores
    answers: AnswerColumns[Any]
    arrived: float
    handled: float


class SteadyDriver:
    """The steady sessions of one coordinator."""

    def __init__(
        self,
        policy: DraftLengthPolicy,
        draft_waits: DraftWaits,
        *,
        act_on: Callable[[RequestState], object],
        fail: Callable[[RequestState, Exception], None],
        plane_between: Callable[[TargetReplica, DraftReplica | None], int],
    ) -> None:
        """``act_on`` does what a request's session asks for; ``fail`` ends a request with an error. ``plane_between``
        is as for ``SessionDriver``.
        """
        self._plane_between = plane_between
        self._policy, self._draft_waits, self._act_on, self._fail = policy, draft_waits, act_on, fail
        self._drafting: _Places[DraftingBatch] = {}
        self._scoring: _Places[ScoringBatch | PlainBatch] = {}
        self._sent: list[_Sent] = []
        self._touched: dict[RequestState, None] = {}
        """Requests that may have become steady."""

    def take_proposals(
        self, replica: DraftReplica, batch: EventBatch[DraftEvent], arrived: float
    ) -> EventBatch[DraftEvent]:
        """Bring proposals of steady sessions to their targets; what is left of the message."""
        return self._without_taken(batch, partial(self._take_proposals, replica, arrived))

    def _take_proposals(
        self, replica: DraftReplica, arrived: float, answers: AnswerColumns[DraftEvent]
    ) -> Iterator[_Sent]:
        for waiting, places, rows in _found(self._drafting, answers):
            if waiting.draft is not replica:
                continue
            plane = self._plane_between(waiting.target, replica) if waiting.batch.reads_states else 0
            if taken := waiting.batch.take(places, rows, answers, self._policy, plane):
                waiting.target.send_columns(taken.commands)
                yield _Sent(waiting, taken, answers, arrived, _now())

    def take_scores(
        self, replica: TargetReplica, batch: EventBatch[TargetEvent], arrived: float
    ) -> EventBatch[TargetEvent]:
        """Judge the scores of steady sessions, and ask for the next step; what is left of the message."""
        return self._without_taken(batch, partial(self._take_scores, replica, arrived))

    def _take_scores(
        self, replica: TargetReplica, arrived: float, answers: AnswerColumns[TargetEvent]
    ) -> Iterator[_Sent]:
        for waiting, places, rows in _found(self._scoring, answers):
            if waiting.target is replica and (taken := waiting.batch.take(places, rows, answers, self._policy)):
                asked = waiting.target if isinstance(waiting.batch, PlainBatch) else waiting.draft
                if asked is not None:
                    asked.send_columns(taken.commands)
                yield _Sent(waiting, taken, answers, arrived, _now())

    def _without_taken(
        self, batch: EventBatch[Any], take: Callable[[AnswerColumns[Any]], Iterator[_Sent]]
    ) -> EventBatch[Any]:
        """What is left of a message: single events, once ``take`` has sent the commands that follow its columns."""
        if not batch.columns:
            return batch
        events: list[Any] = list(batch.events)
        timings: list[Any] = list(batch.timings)
        for answers in batch.columns:
            sent = list(take(answers))
            self._sent += sent
            if sum(len(one.taken.places) for one in sent) < len(answers.sessions):
                taken = {place for one in sent for place in one.taken.places}
                left = [place for place in range(len(answers.sessions)) if place not in taken]
                events += answers.events(left)
                timings += answers.timings(left) if answers.timings_ns else []
        return EventBatch(tuple(events), batch.report, tuple(timings))

    def touch(self, requests: Sequence[RequestState], *, in_columns: bool) -> None:
        """These were answered one by one; ``in_columns``: beside columns, so they may be steady from now on."""
        for request in requests:
            self.forget(request)
        if in_columns:
            self._touched |= dict.fromkeys(requests)

    def forget(self, request: RequestState) -> None:
        """Something else than an answer has happened to the session."""
        self._drafting.pop(request.session, None)
        self._scoring.pop(request.session, None)

    # After the commands have left.

    def settle(self) -> list[RequestState]:
        """Confirm what was sent, and put down what comes next; the requests whose steps have ended."""
        sent, self._sent = self._sent, []
        ended = []
        for one in sent:
            requests = [one.waiting.requests[row] for row in one.taken.rows]
            if isinstance(one.taken, AnsweredProposals):
                self._confirm_proposals(one, one.taken, requests)
            else:
                self._confirm_scores(one, one.taken, requests)
                ended += requests
            self._touched |= dict.fromkeys(requests)
        if self._touched:
            touched, self._touched = self._touched, {}
            self._group_waiting(touched)
        return ended

    def _confirm_proposals(self, sent: _Sent, taken: AnsweredProposals, requests: Sequence[RequestState]) -> None:
        if sent.waiting.draft is not None:
            self._draft_waits.note_response(sent.waiting.draft, requests)
        timings = sent.answers.timings(taken.places)
        proposals = sent.answers.events(taken.places)
        generations = taken.commands.generations.tolist()
        for request, event, timing, generation in zip(requests, proposals, timings, generations, strict=True):
            try:
                command = steady.take_proposal(request.loop, event)
                _require_sent(request, command, generation)
            except Exception as error:
                self._fail(request, error)
                continue
            request.clear_draft_timer()
            request.note(DraftWaitEnded(timing), sent.arrived, sent.handled)

    def _confirm_scores(self, sent: _Sent, taken: AnsweredScores, requests: Sequence[RequestState]) -> None:
        commands, is_drafting = taken.commands, isinstance(taken.commands, ExtendColumns)
        heads = zip(
            requests, sent.answers.generations[taken.places].tolist(), taken.num_accepted, taken.next_token_ids,
            sent.answers.timings(taken.places), commands.draft_lengths.tolist(), commands.generations.tolist(),
            sent.answers.states_at(taken.places), strict=True,
        )  # fmt: skip
        for request, asked, num_accepted, token_id, timing, length, generation, states in heads:
            loop = request.loop
            is_bonus = num_accepted == len(loop.proposal.token_ids)
            verdict = Verdict(num_accepted, token_id, NextToken.BONUS if is_bonus else NextToken.RECOVERED)
            try:
                found = steady.take_verdict(loop, asked, verdict, timing, length=length, states=states)
                _require_sent(request, None if found is None else found[1], generation)
            except Exception as error:
                self._fail(request, error)
                continue
            if found is not None:
                request.note(found[0], sent.arrived, sent.handled)
            if is_drafting:
                self._draft_waits.begin(request, loop.step)
            elif loop.actions:  # a ``Prepare``
                self._act_on(request)

    def _group_waiting(self, requests: Iterable[RequestState]) -> None:
        groups = defaultdict[Any, list[RequestState]](list)
        for request in requests:
            target, draft = request.place.target, request.place.draft
            if target is None or request.trace.notes is not None:
                continue
            # Answers about supports come in columns of their own.
            is_sparse = request.loop.engine_request.rules.rule is JudgingRule.REJECTION
            if PlainBatch.may_hold(request.loop):
                groups[PlainBatch, target, None, is_sparse].append(request)
            elif draft is not None and (kind := next((one for one in _DRAFTED if one.may_hold(request.loop)), None)):
                groups[kind, target, draft, is_sparse].append(request)
        for (kind, target, draft, _), own in groups.items():
            replicas = [one for one in (target, draft) if one is not None]
            if len(own) >= FEWEST_ROWS and all(one.connection.reads_columns for one in replicas):
                waiting: Any = _Waiting(kind([request.loop for request in own]), own, target, draft)
                places: Any = self._drafting if kind is DraftingBatch else self._scoring
                places.update({request.session: (waiting, row) for row, request in enumerate(own)})


def _found(known: _Places[BatchT], answers: AnswerColumns[Any]) -> Iterator[tuple[_Waiting[BatchT], Places, Places]]:
    """The batches that the answers are for: of each the places of its answers, and their rows of the batch."""
    sessions = answers.sessions.tolist()
    if (first := known.get(sessions[0])) is not None and np.array_equal(first[0].batch.numbers, answers.sessions):
        waiting = first[0]
        if [known.pop(session, None) is not None for session in sessions].count(True) == len(sessions):
            yield waiting, slice(None), slice(None)  # nearly always: no session was forgotten
        return
    groups: dict[_Waiting[BatchT], tuple[list[int], list[int]]] = {}
    for place, session in enumerate(sessions):
        found = known.pop(session, None)
        if found is not None:
            places, rows = groups.setdefault(found[0], ([], []))
            places.append(place)
            rows.append(found[1])
    for waiting, (places, rows) in groups.items():
        yield waiting, np.array(places), np.array(rows)


def _require_sent(request: RequestState, command: Extend | Score | None, generation: int) -> None:
    """``IntegrityError`` unless the state machine's command is what was sent with this generation."""
    if command is not None and command.generation == generation:
        return
    commands = request.loop.commands
    while commands.next_generation <= generation:
        commands.skip_generation()
    raise IntegrityError(f"generation {generation} was sent for session {request.session}, whose next step is another")
