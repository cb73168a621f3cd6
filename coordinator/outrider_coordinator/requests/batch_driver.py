"""Batch driver: arrays of answers to the transitions of many sessions, and their commands to the links.

Commands leave first. What they do not depend on waits until they have left, or until anything else happens to a
session: text, statistics, timers, hidden states that are kept, and what is prepared for the next answers.

Where a draft may send its proposals to the target directly, the target is told of what it will score while the draft
computes (``ScoreAhead``), and nothing is sent when they come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from outrider.batched import AnswerBatch, ExtendBatch, ScoreAhead, ScoreBatch
from outrider.ports import DraftEvent, EventBatch, TargetEvent
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.requests.step_ends import StepEnds
from outrider_coordinator.requests.taken_answers import PreparedBatch, TakenAnswers
from outrider_coordinator.routing.peers import Peers
from outrider_coordinator.routing.services import DraftReplica, TargetReplica
from outrider_coordinator.session.prepared import Prepared
from outrider_coordinator.session.prepared_claims import PreparedClaims
from outrider_coordinator.session.prepared_proposals import PreparedProposals, announce
from outrider_coordinator.session.table import Ints, SessionTable
from outrider_coordinator.session.transitions import PROPOSALS, SCORES, answered, are_announced, prepare
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.request_timings import RequestTimings

_now = RequestTimings.now
_Taken: TypeAlias = Iterator[TakenAnswers | None]
_MAX_PREPARED = 64
"""Batches that may wait to be answered; those of regrouped sessions are never answered whole."""


class BatchDriver:
    """Transitions of one coordinator's sessions by arrays of answers."""

    def __init__(
        self,
        table: SessionTable,
        policy: DraftLengthPolicy,
        draft_waits: DraftWaits,
        peers: Peers,
        *,
        find: Callable[[int], RequestState | None],
        act_on: Callable[[RequestState], object],
        fail: Callable[[RequestState, Exception], None],
    ) -> None:
        """``find`` a request by its session's number; ``act_on`` does what a request's session asks for; ``fail`` ends
        a request with an error.
        """
        self._table, self._policy, self._find = table, policy, find
        self._ends = StepEnds(draft_waits, act_on=act_on, fail=fail)
        self._peers = peers
        self._prepared: dict[bytes, PreparedBatch] = {}
        """Prepared batches by the numbers of their sessions."""
        self._taken: list[TakenAnswers] = []
        self._announced: dict[DraftReplica, tuple[ScoreAhead, TargetReplica, int]] = {}
        """Rest of each draft's last ``ScoreAhead`` that waits, with the target that has it, and its plane."""
        self._early: list[tuple[TargetReplica, EventBatch[TargetEvent]]] = []
        """Scores of direct proposals that have not come here yet: they are judged by these."""

    def hold_early(self, replica: TargetReplica, batch: EventBatch[TargetEvent]) -> EventBatch[TargetEvent] | None:
        """Hold the scores of proposals that have not come here yet, by the other link; the rest of the message, None
        if nothing is left.
        """
        if not self._announced:
            return batch
        early, left = [], []
        for answers in batch.batched:
            are_early = are_announced(self._table, answers.sessions, answers.generations)
            early += [_selected(answers, np.flatnonzero(are_early))] if are_early.any() else []
            left += [_selected(answers, np.flatnonzero(~are_early))] if not are_early.all() else []
        if not early:
            return batch
        rest = replace(batch, batched=tuple(left)) if batch.events or left else None
        self._early.append((replica, EventBatch((), None if rest else batch.report, batched=tuple(early))))
        return rest

    def draft_lost(self, replica: DraftReplica) -> None:
        """No proposals come from a draft any more."""
        self._announced.pop(replica, None)

    def take_early(self) -> list[tuple[TargetReplica, EventBatch[TargetEvent]]]:
        """All that is held, since proposals have come or come no more; it may have to be held again."""
        early, self._early = self._early, []
        return early

    def take_proposals(
        self, replica: DraftReplica, batch: EventBatch[DraftEvent], arrived: float
    ) -> EventBatch[DraftEvent]:
        """Bring proposals to their targets; what is left of the message."""
        return self._without_taken(batch, partial(self._take_proposals, replica, arrived))

    def take_scores(
        self, replica: TargetReplica, batch: EventBatch[TargetEvent], arrived: float
    ) -> EventBatch[TargetEvent]:
        """Judge scores, and ask for the next steps; what is left of the message."""
        return self._without_taken(
            batch, lambda answers: (self._asked_next(arrived, *one) for one in self._batches(replica, answers, SCORES))
        )

    def _take_proposals(self, replica: DraftReplica, arrived: float, answers: AnswerBatch[Any]) -> _Taken:
        target = self._target_that_scores(replica, answers)
        for one in self._batches(replica, answers, PROPOSALS):
            yield self._sent_on(arrived, target, *one)

    def _batches(
        self, replica: DraftReplica | TargetReplica, answers: AnswerBatch[Any], kinds: tuple[type[Prepared], ...]
    ) -> Iterator[tuple[PreparedBatch, AnswerBatch[Any], Sequence[int]]]:
        """Batches that the answers are for, each with its own answers and their indices: the one that was prepared for
        all of them, otherwise those that the rows of each target and draft give now. Each session is answered once.
        """
        whole = self._prepared.pop(answers.sessions.tobytes(), None)
        is_own = whole is not None and isinstance(whole.prepared, kinds) and replica in (whole.target, whole.draft)
        if whole is not None and is_own and whole.prepared.is_of(answers):
            yield whole, answers, range(len(answers.sessions))
            return
        for one in self._taken:
            one.commit()  # all rows are up to date then
        groups: dict[tuple[TargetReplica, DraftReplica | None], dict[int, int]] = {}
        for place, number in enumerate(answers.sessions.tolist()):
            request = self._find(number)
            target, draft = (None, None) if request is None else (request.place.target, request.place.draft)
            if target is not None and replica in (target, draft):
                groups.setdefault((target, draft), {}).setdefault(number, place)
        for (target, draft), own_indices in groups.items():
            indices = np.array(list(own_indices.values()))
            own = _selected(answers, indices)
            for fitting, found in answered(self._table, self._table.indices(own_indices), own, kinds):
                fit = _selected(own, fitting)
                requests: list[Any] = list(map(self._find, fit.sessions.tolist()))
                yield PreparedBatch(found, requests, target, draft), fit, indices[fitting].tolist()

    def _target_that_scores(self, draft: DraftReplica, answers: AnswerBatch[Any]) -> TargetReplica | None:
        """The target that scores these proposals already: it was told to, and has all of them; None: no target does."""
        if draft not in self._announced:
            return None
        ahead, target, plane = self._announced[draft]
        if (rows := ahead.rows_for(answers.channel_key, answers.counts)) is None:
            return None
        del self._announced[draft]
        if (rest := ahead.without(rows)) is not None:
            self._announced[draft] = rest, target, plane
        is_sent = 0 != answers.channel == ahead.channel == self._peers.channel(target, draft)
        return target if is_sent and plane == self._peers.plane(target, draft) else None

    def _sent_on(
        self,
        arrived: float,
        scoring: TargetReplica | None,
        batch: PreparedBatch,
        answers: AnswerBatch[Any],
        indices: Sequence[int],
    ) -> TakenAnswers | None:
        """Bring proposals to their target. ``scoring``: the target that scores them already."""
        target = batch.target
        prepared: Any = batch.prepared
        plane = self._peers.plane(target, batch.draft)
        taken = prepared.take(answers, self._policy, plane=plane, is_direct=target is scoring)
        if taken is None:
            return None
        if not taken.is_direct:
            target.send_batch(taken.commands)
        elif not self._has_answered(target, taken.commands):
            target.note_direct(taken.commands)
        return TakenAnswers(batch, taken, answers, indices, arrived, _now())

    def _has_answered(self, target: TargetReplica, commands: ScoreBatch) -> bool:
        """True if answers of a target to these are held."""
        held = {session for found, batch in self._early if found is target for session in batch.sessions_in_batch}
        return bool(held) and not held.isdisjoint(commands.sessions.tolist())

    def _asked_next(
        self, arrived: float, batch: PreparedBatch, answers: AnswerBatch[Any], indices: Sequence[int]
    ) -> TakenAnswers | None:
        """Judge scores, and ask the draft for the next proposals or the target for the next tokens."""
        channel = self._peers.channel(batch.target, batch.draft)
        prepared: Any = batch.prepared
        taken = prepared.take(answers, self._policy, channel=channel)
        if taken is None:
            return None
        asked: Any = batch.draft if isinstance(taken.commands, ExtendBatch) else batch.target
        asked.send_batch(taken.commands)
        if len(taken.indices) < len(indices):
            indices = [indices[place] for place in taken.indices]
        return TakenAnswers(batch, taken, answers, indices, arrived, _now())

    def _without_taken(self, batch: EventBatch[Any], take: Callable[[AnswerBatch[Any]], _Taken]) -> EventBatch[Any]:
        """Rest of a message, as single events, once ``take`` has sent the commands that follow from it."""
        rest = list(batch.timed())
        named: set[int] = set()
        """Sessions of the arrays before: what is said of them once more comes after them."""
        for answers in batch.batched:
            sessions = answers.sessions.tolist()
            done: list[TakenAnswers] = []
            for one in take(answers) if named.isdisjoint(sessions) else ():
                if one is not None:
                    done.append(one)
                    self._taken.append(one)
            named.update(sessions)
            if sum([len(one.indices) for one in done]) < len(sessions):
                taken = {place for one in done for place in one.indices}
                left = [place for place in range(len(sessions)) if place not in taken]
                rest += zip(answers.events(left), answers.timings(left), strict=True)
        return EventBatch.of(rest, batch.report)

    def has_taken(self, events: Sequence[DraftEvent | TargetEvent]) -> bool:
        """True if an event is of a session of which something is still to be done."""
        if not (self._taken and events):
            return False
        taken = {request.session for one in self._taken for request in one.requests}
        return any(event.session in taken for event in events)

    # After the commands have left.

    def post_process(self) -> list[RequestState]:
        """Do what has waited for the commands to leave; the requests whose steps have ended."""
        if not self._taken:
            return []
        done, self._taken = self._taken, []
        ended: list[RequestState] = []
        for one in done:
            one.commit()
        for one in done:
            if one.taken.num_tokens is None:
                self._ends.end_waits(one)
            else:
                self._ends.end_steps(one)
                ended += one.requests
        is_alone = sum(isinstance(one.taken.commands, ExtendBatch) for one in done) == 1
        for one in done:
            self._prepare(one, may_announce=is_alone)
        return ended

    def _prepare(self, one: TakenAnswers, *, may_announce: bool) -> None:
        """Put down what follows from the next answers to these requests."""
        index, batch, requests = one.index, one.batch, one.requests
        if any(request.is_over for request in requests):
            going_on = [place for place, request in enumerate(requests) if not request.is_over]
            index, requests = index[going_on], [requests[place] for place in going_on]
            may_announce = False
        if not requests:
            return
        if isinstance(batch.prepared, PreparedClaims):
            return  # what follows depends on the draft tokens that come with the scores
        commands = one.taken.commands
        channel = 0
        if may_announce and isinstance(commands, ExtendBatch) and self._may_announce(one, commands):
            channel = commands.channel
            announce(self._table, index)
        found = prepare(self._table, index)
        if found is None:
            return
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[found.numbers.tobytes()] = PreparedBatch(found, requests, batch.target, batch.draft)
        if channel and isinstance(found, PreparedProposals) and batch.draft is not None:
            plane = self._peers.plane(batch.target, batch.draft)
            if (announcement := found.announcement(channel, plane)) is not None:
                self._announced[batch.draft] = announcement, batch.target, plane
                batch.target.send_alone(announcement)

    def _may_announce(self, one: TakenAnswers, commands: ExtendBatch) -> bool:
        """True if all that a draft computes now may go to the target directly."""
        target, draft = one.batch.target, one.batch.draft
        if draft is None or not commands.channel or commands.channel != self._peers.channel(target, draft):
            return False
        if draft.num_steps_open != len(commands):
            return False
        return commands.states is None or bool(self._peers.plane(target, draft))


def _selected(answers: AnswerBatch[Any], indices: Ints) -> AnswerBatch[Any]:
    """The answers at these indices."""
    if len(indices) == len(answers.sessions) and (indices == np.arange(len(indices))).all():
        return answers
    return answers.selected(indices)
