"""Steady driver: the next commands of steady sessions leave first, and their state machines confirm them afterwards.

While the services compute, the sessions that wait for them are put into batches (``drafting_batch``, ``scoring_batch``,
``plain_batch``). An answer that comes as columns is judged and answered from those. What was sent is confirmed when the
commands have left, or before anything else happens to any session.

Where a draft may send its proposals to the target directly, the target is told of what it will score while the draft
computes (``ScoreAhead``), and nothing is sent when they come here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.columns import FEWEST_PLAIN_ROWS, AnswerColumns, ExtendColumns
from outrider.errors import IntegrityError
from outrider.ports import DraftEvent, EventBatch, Extend, Score, TargetEvent
from outrider.types import JudgingRule
from outrider_coordinator.acceptance import NextToken, Verdict
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.early_scores import EarlyScores
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.services import DraftReplica, TargetReplica
from outrider_coordinator.session import steady
from outrider_coordinator.session.actions import DraftWaitEnded
from outrider_coordinator.session.answered import AnsweredProposals, AnsweredScores, Ints, Places, ints, is_same
from outrider_coordinator.session.drafting_batch import DraftingBatch
from outrider_coordinator.session.drafting_row import DraftingRow
from outrider_coordinator.session.plain_batch import PlainBatch
from outrider_coordinator.session.scoring_batch import ScoringBatch
from outrider_coordinator.session.scoring_row import ScoringRow
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.request_timings import RequestTimings

_now = RequestTimings.now
_DRAFTED: tuple[type[DraftingBatch | ScoringBatch], ...] = (DraftingBatch, ScoringBatch)
_ALONE: dict[type[Any], type[DraftingRow | ScoringRow]] = {DraftingBatch: DraftingRow, ScoringBatch: ScoringRow}
"""What a batch is of one session."""

BatchT = TypeVar("BatchT", DraftingBatch | DraftingRow, PlainBatch, ScoringBatch | ScoringRow | PlainBatch)


@dataclass(slots=True, eq=False)
class _Waiting(Generic[BatchT]):
    """A batch, its requests, and where they live."""

    batch: BatchT
    requests: Sequence[RequestState]
    target: TargetReplica
    draft: DraftReplica | None
    """None with a ``PlainBatch`` alone."""
    is_sparse: bool
    """Whether its answers are about supports: those come in columns of their own."""
    is_whole: bool = True
    """Whether all of its sessions are known to wait."""
    is_answered: bool = False
    """Whether all of them were answered together: none waits any more."""


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

    @property
    def requests(self) -> list[RequestState]:
        """Those that were answered."""
        return [self.waiting.requests[row] for row in self.taken.rows]

    @property
    def sessions(self) -> frozenset[int]:
        """Those that were answered."""
        return frozenset(self.taken.commands.sessions.tolist())

    @property
    def tokens(self) -> Ints:
        """The token that each plain step brought."""
        return self.taken.commands.token_ids


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
        channel_between: Callable[[TargetReplica, DraftReplica | None], int],
    ) -> None:
        """``act_on`` does what a request's session asks for; ``fail`` ends a request with an error. ``plane_between``
        and ``channel_between`` are as for ``SessionDriver``.
        """
        self._plane_between, self._channel_between = plane_between, channel_between
        self._policy, self._draft_waits, self._act_on, self._fail = policy, draft_waits, act_on, fail
        self._drafting: _Places[DraftingBatch | DraftingRow] = {}
        self._scoring: _Places[ScoringBatch | ScoringRow | PlainBatch] = {}
        self._sent: list[_Sent] = []
        self.early = EarlyScores(self._is_early)
        self._touched: dict[RequestState, None] = {}
        """Requests that may have become steady."""
        self._answered_singly: set[RequestState] = set()
        """Requests that were answered one by one since ``settle``."""
        self._failed: set[RequestState] = set()
        """Requests that ended because another command was sent than their next."""

    def take_proposals(
        self, replica: DraftReplica, batch: EventBatch[DraftEvent], arrived: float
    ) -> EventBatch[DraftEvent]:
        """Bring proposals of steady sessions to their targets; what is left of the message."""
        return self._without_taken(batch, partial(self._take_proposals, replica, arrived))

    def _take_proposals(
        self, replica: DraftReplica, arrived: float, answers: AnswerColumns[DraftEvent]
    ) -> Iterator[_Sent]:
        for waiting, places, rows in _found(self._drafting, answers):
            taken = None
            if waiting.draft is replica:
                plane = self._plane_between(waiting.target, replica) if waiting.batch.reads_states else 0
                channel = self._channel_between(waiting.target, replica)
                taken = waiting.batch.take(places, rows, answers, self._policy, plane=plane, channel=channel)
            if taken is not None:
                if not taken.is_direct:
                    waiting.target.send_columns(taken.commands)
                elif not self.early.are_held(waiting.target):
                    waiting.target.connection.note_direct(taken.commands)
                yield _Sent(waiting, taken, answers, arrived, _now())
            elif waiting.is_answered:
                self._drop(waiting)

    def take_scores(
        self, replica: TargetReplica, batch: EventBatch[TargetEvent], arrived: float
    ) -> EventBatch[TargetEvent]:
        """Judge the scores of steady sessions, and ask for the next step; what is left of the message."""
        return self._without_taken(batch, partial(self._take_scores, replica, arrived))

    def _take_scores(
        self, replica: TargetReplica, arrived: float, answers: AnswerColumns[TargetEvent]
    ) -> Iterator[_Sent]:
        for waiting, places, rows in _found(self._scoring, answers):
            if waiting.target is replica and (taken := self._judged(waiting, places, rows, answers)):
                asked = waiting.target if isinstance(waiting.batch, PlainBatch) else waiting.draft
                if asked is not None:
                    asked.send_columns(taken.commands)
                yield _Sent(waiting, taken, answers, arrived, _now())
            elif waiting.is_answered:
                self._drop(waiting)

    def _judged(
        self,
        waiting: _Waiting[ScoringBatch | ScoringRow | PlainBatch],
        places: Places,
        rows: Places,
        answers: AnswerColumns[TargetEvent],
    ) -> AnsweredScores | None:
        batch = waiting.batch
        if isinstance(batch, PlainBatch):
            return batch.take(places, rows, answers, self._policy)
        channel = self._channel_between(waiting.target, waiting.draft)
        return batch.take(places, rows, answers, self._policy, channel=channel)

    def _is_early(self, session: int, generation: int) -> bool:
        """Whether scores are of proposals that have not come here yet."""
        found = self._drafting.get(session)
        return found is not None and not found[0].is_answered and found[0].batch.is_ahead(found[1], generation)

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

    def has_sent(self, events: Sequence[DraftEvent | TargetEvent]) -> bool:
        """Whether an event is of a session for which a command waits to be confirmed."""
        return any(not sent.sessions.isdisjoint(event.session for event in events) for sent in self._sent)

    def touch(self, requests: Sequence[RequestState], *, in_columns: bool) -> None:
        """These were answered one by one; ``in_columns``: beside columns, so they may be steady from now on."""
        for request in requests:
            self.forget(request)
        self._answered_singly.update(requests)
        if in_columns:
            self._touched |= dict.fromkeys(requests)

    def forget(self, request: RequestState) -> None:
        """Something else than an answer has happened to the session."""
        for known in (self._drafting, self._scoring):
            if (found := known.pop(request.session, None)) is not None:
                found[0].is_whole = False

    # After the commands have left.

    def settle(self) -> list[RequestState]:
        """Confirm what was sent, and put down what comes next; the requests whose steps have ended."""
        sent, self._sent = self._sent, []
        ended = []
        going_on: list[_Waiting[PlainBatch]] = []
        for one in sent:
            requests = one.requests
            if isinstance(one.taken, AnsweredProposals):
                self._confirm_proposals(one, one.taken, requests)
            else:
                self._confirm_scores(one, one.taken, requests)
                ended += requests
            if isinstance(one.waiting.batch, PlainBatch):
                going_on += self._go_on(one, requests)
            else:
                if one.waiting.is_answered:
                    self._drop(one.waiting)
                self._touched |= dict.fromkeys(requests)
        if self._touched or len(going_on) > 1:
            touched, self._touched = self._touched, {}
            self._group_waiting(touched, going_on)
            self._score_ahead(sent)
        self._answered_singly.clear()
        self._failed.clear()
        return ended

    def _go_on(self, sent: _Sent, requests: Sequence[RequestState]) -> Iterator[_Waiting[PlainBatch]]:
        """Let those sessions of a plain batch wait on to which nothing else has happened; the others are touched."""
        waiting, rows, tokens = sent.waiting, ints(sent.taken.rows), sent.tokens
        others = self._answered_singly.union(self._failed)
        if waiting.is_answered:
            if waiting.is_whole and len(rows) == len(waiting.requests) and others.isdisjoint(requests):
                waiting.batch = waiting.batch.following(slice(None), tokens)
                waiting.is_answered = False
                yield waiting
                return
            self._drop(waiting)
        go_on = np.array([request not in others for request in requests])
        self._touched |= dict.fromkeys(request for request in requests if request in others)
        if np.count_nonzero(go_on) < FEWEST_PLAIN_ROWS:
            self._touched |= dict.fromkeys(requests)
            return
        batch = waiting.batch.following(rows[go_on], tokens[go_on])
        own = [request for request, goes_on in zip(requests, go_on.tolist(), strict=True) if goes_on]
        yield self._wait(_Waiting(batch, own, waiting.target, None, waiting.is_sparse), self._scoring)

    def _wait(self, waiting: _Waiting[Any], known: _Places[Any]) -> _Waiting[Any]:
        known.update({number: (waiting, row) for row, number in enumerate(waiting.batch.numbers.tolist())})
        return waiting

    def _drop(self, waiting: _Waiting[Any]) -> None:
        """Nothing of the batch waits any more."""
        known: _Places[Any] = (
            self._drafting if isinstance(waiting.batch, DraftingBatch | DraftingRow) else self._scoring
        )
        for number in waiting.batch.numbers.tolist():
            if (found := known.get(number)) is not None and found[0] is waiting:
                del known[number]

    def _score_ahead(self, sent: Sequence[_Sent]) -> None:
        """Tell a target what it will score, where all that its draft computes now may go to it directly."""
        asked = [(one, one.taken.commands) for one in sent if isinstance(one.taken.commands, ExtendColumns)]
        if len(asked) != 1:
            return
        one, commands = asked[0]
        requests, target, draft = one.requests, one.waiting.target, one.waiting.draft
        if draft is None or not (commands.channel and commands.channel == self._channel_between(target, draft)):
            return
        found = self._drafting.get(requests[0].session)
        if found is None or found[0].requests != requests or draft.connection.num_steps_open != len(requests):
            return
        batch = found[0].batch
        plane = self._plane_between(target, draft) if batch.reads_states else 0
        if plane or not batch.reads_states:
            target.connection.send_alone(batch.ahead(commands.channel, plane))

    def _confirm_proposals(self, sent: _Sent, taken: AnsweredProposals, requests: Sequence[RequestState]) -> None:
        if sent.waiting.draft is not None:
            self._draft_waits.note_response(sent.waiting.draft, requests)
        timings = sent.answers.timings(taken.places)
        proposals = sent.answers.events(taken.places)
        generations = taken.commands.generations.tolist()
        for request, event, timing, generation in zip(requests, proposals, timings, generations, strict=True):
            try:
                command = steady.take_proposal(request.loop, event, generation if taken.is_direct else None)
                _require_sent(request, command, generation)
            except Exception as error:
                self._fail(request, error)
                continue
            request.clear_draft_timer()
            request.note(DraftWaitEnded(timing), sent.arrived, sent.handled)

    def _confirm_scores(self, sent: _Sent, taken: AnsweredScores, requests: Sequence[RequestState]) -> None:
        commands, is_drafting = taken.commands, isinstance(taken.commands, ExtendColumns)
        is_plain = isinstance(sent.waiting.batch, PlainBatch)
        heads = zip(
            requests, sent.answers.generations[taken.places].tolist(), taken.num_accepted.tolist(),
            taken.next_token_ids.tolist(), sent.answers.timings(taken.places), commands.draft_lengths.tolist(),
            commands.generations.tolist(), sent.answers.states_at(taken.places), strict=True,
        )  # fmt: skip
        arrived, handled = sent.arrived, sent.handled
        for request, asked, num_accepted, token_id, timing, length, generation, states in heads:
            loop = request.loop
            try:
                if is_plain and (reason := steady.take_plain(loop, asked, token_id, generation)) is not None:
                    request.note_plain(token_id, reason, timing, arrived, handled)
                else:
                    is_bonus = num_accepted == len(loop.proposal.token_ids)
                    verdict = Verdict(num_accepted, token_id, NextToken.BONUS if is_bonus else NextToken.RECOVERED)
                    found = steady.take_verdict(loop, asked, verdict, timing, length=length, states=states)
                    _require_sent(request, None if found is None else found[1], generation)
                    if found is not None:
                        request.note(found[0], arrived, handled)
            except Exception as error:
                self._fail(request, error)
                self._failed.add(request)
                continue
            if is_drafting:
                self._draft_waits.begin(request, loop.step)
            elif loop.actions:  # a ``Prepare``
                self._act_on(request)

    def _group_waiting(self, requests: Iterable[RequestState], going_on: Sequence[_Waiting[PlainBatch]]) -> None:
        """Put requests that have become steady into batches: plain ones beside those that go on, if there are any."""
        groups = defaultdict[Any, list[RequestState]](list)
        for request in requests:
            target, draft = request.place.target, request.place.draft
            if target is None or request.trace.notes is not None:
                continue
            is_sparse = request.loop.engine_request.rules.rule is JudgingRule.REJECTION
            if PlainBatch.may_hold(request.loop):
                groups[PlainBatch, target, None, is_sparse].append(request)
            elif draft is not None and (kind := next((one for one in _DRAFTED if one.may_hold(request.loop)), None)):
                groups[kind, target, draft, is_sparse].append(request)
        plain = self._joined(going_on)
        for (kind, target, draft, is_sparse), own in groups.items():
            if kind is PlainBatch and (beside := plain.get((target, is_sparse))) is not None:
                self._join(beside, PlainBatch([request.loop for request in own]), own)
                continue
            replicas = [one for one in (target, draft) if one is not None]
            are_enough = kind is not PlainBatch or len(own) >= FEWEST_PLAIN_ROWS
            if are_enough and all(one.connection.reads_columns for one in replicas):
                make: Any = _ALONE.get(kind, kind) if len(own) == 1 else kind
                waiting: Any = _Waiting(make([request.loop for request in own]), own, target, draft, is_sparse)
                places: Any = self._drafting if kind is DraftingBatch else self._scoring
                self._wait(waiting, places)

    def _joined(self, going_on: Sequence[_Waiting[PlainBatch]]) -> dict[tuple[TargetReplica, bool], _Waiting[Any]]:
        """One batch of those that may be answered together."""
        found: dict[tuple[TargetReplica, bool], _Waiting[Any]] = {}
        for one in going_on:
            key = one.target, one.is_sparse
            found[key] = self._join(found[key], one.batch, one.requests) if key in found else one
        return found

    def _join(
        self, waiting: _Waiting[PlainBatch], batch: PlainBatch, requests: Sequence[RequestState]
    ) -> _Waiting[PlainBatch]:
        every = [*waiting.requests, *requests]
        joined = _Waiting(waiting.batch.joined(batch), every, waiting.target, None, waiting.is_sparse)
        return self._wait(joined, self._scoring)


def _found(known: _Places[BatchT], answers: AnswerColumns[Any]) -> Iterator[tuple[_Waiting[BatchT], Places, Places]]:
    """The batches that the answers are for: of each the places of its answers, and their rows of the batch."""
    if (first := known.get(answers.sessions.item(0))) is not None:
        waiting = first[0]  # nearly always it is all of one batch: no session was forgotten
        if waiting.is_whole and not waiting.is_answered and is_same(waiting.batch.numbers, answers.sessions):
            waiting.is_answered = True
            yield waiting, slice(None), slice(None)
            return
    groups: dict[_Waiting[BatchT], tuple[list[int], list[int]]] = {}
    for place, session in enumerate(answers.sessions.tolist()):
        found = known.pop(session, None)
        if found is not None and not found[0].is_answered:
            found[0].is_whole = False
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
