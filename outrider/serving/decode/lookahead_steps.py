"""Plain steps of a core that are computed before they are asked for, as arrays.

Sessions that have credit (``outrider.serving.lookahead``) and whose next item is known but for its arrival are steps of
one chain: those that are computed, the one that runs, and one that is queued behind it or is to be started next. A
session joins when it was answered. Whatever else than the expected item comes for it, its rows become the requests that
single items would have made, and the others stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import ScoreBatch, chain_rows
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES
from outrider.recording import ForwardRecord
from outrider.serving.decode.lookahead_step import KnownTokens, LookaheadStep, Rows
from outrider.serving.decode.sessions import Bools, Ints, RunningSessions
from outrider.serving.executor import CommonEvent, Executor, ExecutorOutput
from outrider.serving.lookahead import MAX_STEPS_AHEAD, Lookahead
from outrider.serving.request import AnyRequest, Batch, Request, RequestQueue, RequestStatus, RunningJob
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats

FEWEST_SESSIONS = 16
"""Fewer take no less time as arrays."""


@dataclass(frozen=True, slots=True)
class LookaheadAnswers:
    """Rows of a step that are computed and asked for."""

    step: LookaheadStep
    indices: Rows

    @property
    def keys(self) -> list[SessionKey]:
        """Sessions of the answers."""
        sessions = self.step.sessions
        return [sessions[place].key for place in self.indices.tolist()]

    def by_link(self) -> list[tuple[int, LookaheadAnswers]]:
        """Answers of each link."""
        return [
            (link_id, LookaheadAnswers(self.step, indices)) for link_id, indices in self._by(self.step.own.link_ids)
        ]

    def by_form(self) -> list[LookaheadAnswers]:
        """Tokens, and sparse scores."""
        return [LookaheadAnswers(self.step, indices) for _, indices in self._by(self.step.own.are_sparse)]

    def _by(self, kinds: NDArray[Any]) -> list[tuple[int, Rows]]:
        own = kinds[self.indices]
        found = np.unique(own).tolist()
        return [(kind, self.indices if len(found) == 1 else self.indices[own == kind]) for kind in found]


class LookaheadSteps:
    """The chain of one core."""

    def __init__(
        self,
        table: SessionRegistry[Any],
        executor: Executor[Any, Any, Any, Any],
        queue: RequestQueue,
        lookahead: Lookahead,
        *,
        stats: ServiceStats,
        clock: Callable[[], int],
    ) -> None:
        self._table, self._executor, self._queue, self._lookahead = table, executor, queue, lookahead
        self._stats, self._clock = stats, clock
        self.links: set[int] = set()
        """Links that read arrays; sessions of others do not join."""
        self._members = set[SessionKey]()
        """Sessions that have rows, and some that had."""
        self._computed: list[LookaheadStep] = []
        """Steps that are to be asked for, or followed; the oldest first."""
        self._due: LookaheadStep | None = None
        """Step to be started next."""
        self._running: Batch | None = None
        self._queued: Batch | None = None
        """Batch behind the one that runs."""
        self._may_grow = False
        """True if something has happened since the last attempt to follow what is computed."""

    # What there is.

    @property
    def is_empty(self) -> bool:
        """True if nothing is due or runs, and nothing is held for an item to come."""
        return self._due is None and self._running is None and not any(step.unasked.any() for step in self._computed)

    @property
    def has_members(self) -> bool:
        """True if any session has rows, or had."""
        return bool(self._members)

    @property
    def is_due(self) -> bool:
        """True if a step may be started, if nothing runs."""
        return self._due is not None or (self._may_grow and self._lookahead.is_possible)

    def is_asked(self, key: SessionKey) -> bool:
        """True if a session waits for an answer."""
        if key not in self._members:
            return False
        found = [(step, step.place_of(key)) for step in self._under_way()]
        return any(place is not None and step.is_asked[place] for step, place in found)

    def num_unasked(self, key: SessionKey) -> int:
        """Steps of a session that are computed or to be computed, and not asked for; one that is queued is not
        counted.
        """
        if key not in self._members:
            return 0
        found = [(step, step.place_of(key)) for step in (*self._computed, *self._under_way())]
        return sum(place is not None and not step.is_asked[place] for step, place in found)

    def _under_way(self) -> list[LookaheadStep]:
        running = self._running.plain if self._running is not None else None
        return [step for step in (running, self._due) if step is not None]

    # Credit.

    def grant(self, session: Session[Any], num_steps: int) -> bool:
        """``Lookahead.grant``; False for a session that has no rows."""
        if session.key not in self._members:
            return False
        session.lookahead_credit = max(0, num_steps - self.num_unasked(session.key))
        self._may_grow = True
        return True

    # Steps to come.

    def join(self, requests: Sequence[AnyRequest]) -> Sequence[AnyRequest]:
        """Take sessions in that were served as single items; the requests of the others."""
        if len(requests) + len(self._members) < FEWEST_SESSIONS or not self._lookahead.is_possible:
            return requests
        joining, others = list[AnyRequest](), list[AnyRequest]()
        for request in requests:
            (joining if self._may_join(request) else others).append(request)
        if not joining or len(joining) + len(self._members) < FEWEST_SESSIONS:
            return requests
        # What is held of each, or was answered: of its steps that are computed all but the last are followed.
        known = [self._queue.take_prepared(request.session.key) or [request] for request in joining]
        for depth in range(max(map(len, known))):
            groups: dict[object, list[list[AnyRequest]]] = {}
            for own in known:
                if len(own) > depth:
                    groups.setdefault(_forward_of(own[depth]), []).append(own)
            for group in groups.values():
                step = self._computed_step([own[depth] for own in group])
                step.is_open &= np.array([len(own) == depth + 1 for own in group], dtype=np.bool_)
                self._computed.append(step)
        self._members.update([request.session.key for request in joining])
        self._may_grow = True
        self._drop_done()
        return others

    def _computed_step(self, requests: Sequence[AnyRequest]) -> LookaheadStep:
        """Step of requests that one forward has served."""
        sessions = [request.session for request in requests]
        own = RunningSessions.of(sessions, self._executor.session_rows(sessions))
        answers: list[Any] = [request.answer for request in requests]
        bases = _ints([answer.base_length for answer in answers])
        step = LookaheadStep(own, bases, _ints([request.item.token_ids[-1] for request in requests]))
        step.is_asked = np.array([request.is_asked for request in requests], dtype=np.bool_)
        ended_ns, batch_size, num_tokens = _forward_of(requests[0])
        step.forward = ForwardRecord(ended_ns, ended_ns, ended_ns, batch_size, num_tokens, used_graph=False)
        step.outcome = KnownTokens.of(answers)
        step.is_open = own.do_not_end(step.outcome.token_ids, bases)
        return step

    def awaits(self, batch: Batch) -> bool:
        """True if sessions of a batch of requests are to join when it has ended: no single items are queued behind
        it.
        """
        if len(batch.scheduled) < FEWEST_SESSIONS or not self._lookahead.is_possible:
            return False
        return sum(self._is_plain(request) for request, _ in batch.scheduled) >= FEWEST_SESSIONS

    def _may_join(self, request: AnyRequest) -> bool:
        answer, key = request.answer, request.session.key
        if answer is None or isinstance(answer, CommonEvent) or not KnownTokens.is_one(answer.form):
            return False
        newest = request if request.status is RequestStatus.PREPARED else None
        if self._queue.due_of(key) is not None or self._queue.last_prepared(key) is not newest:
            return False
        return self._is_plain(request)

    def _is_plain(self, request: AnyRequest) -> bool:
        session = request.session
        return (
            request.status is not RequestStatus.ABORTED
            and session.link_id in self.links
            and session.lookahead_credit > 0
            and self._executor.may_be_plain(session)
        )

    def grow(self) -> None:
        """Make the steps after those that are computed due."""
        if not self._may_grow or not self._lookahead.is_possible:
            return
        self._may_grow = False
        if not any((step.is_here & step.is_open).any() for step in self._computed):
            return
        num_unasked = self._num_unasked(self._computed)
        found = [(step, indices) for step in self._computed if len(indices := self._to_follow(step, num_unasked))]
        num_rows = sum(len(indices) for _, indices in found) + (0 if self._due is None else len(self._due))
        if len(self._members) < FEWEST_SESSIONS or num_rows > self._executor.num_pages_free:
            for step, indices in found:
                for place in indices.tolist():
                    self._go_on_alone(step, place)
            return
        parts = []
        for step, indices in found:
            step.is_open[indices] = False
            parts.append(self._after(step, indices))
        for step in self._computed:
            step.is_open &= ~step.is_asked  # what was answered without credit is followed by what it asks for next
        self._add_due(parts)
        self._drop_done()

    @staticmethod
    def _to_follow(step: LookaheadStep, num_unasked: Counter[SessionKey]) -> Rows:
        """Rows of a step that is computed whose next ones may be computed."""
        indices = np.flatnonzero(step.is_here & step.is_open)
        sessions = step.sessions
        has_credit = [
            bool(sessions[place].lookahead_credit)
            and (not num_unasked or num_unasked[sessions[place].key] < MAX_STEPS_AHEAD)
            for place in indices.tolist()
        ]
        return indices[np.array(has_credit, dtype=np.bool_)]

    @staticmethod
    def _num_unasked(steps: Sequence[LookaheadStep]) -> Counter[SessionKey]:
        """Number of steps of each session that are not asked for; empty if none has as many as it may have."""
        held = [step for step in steps if step.unasked.any()]
        if len(held) < MAX_STEPS_AHEAD:
            return Counter()
        return Counter(step.sessions[place].key for step in held for place in np.flatnonzero(step.unasked).tolist())

    def _after(self, step: LookaheadStep, indices: Rows) -> LookaheadStep:
        if step.outcome is None:
            raise ValueError("a step that is not computed tells nothing of the next one")
        own = step.own if len(indices) == len(step) else step.own.selected(indices)
        return LookaheadStep(own, step.bases[indices] + 1, step.outcome.token_ids[indices])

    def _add_due(self, parts: Sequence[LookaheadStep]) -> None:
        """Steps that are to be started together; their credit is spent."""
        for part in parts:
            for session in part.sessions:
                session.lookahead_credit -= 1
        known = [] if self._due is None else [self._due]
        if known or parts:
            self._due = LookaheadStep.joined([*known, *parts])

    @property
    def due(self) -> LookaheadStep | None:
        """The step that is to be started next, with the rows that are here yet."""
        if self._due is not None:
            self._due = self._due.without_gone() if self._due.is_here.any() else None
        return self._due

    def split_due(self) -> None:
        """Have requests for what is due."""
        if self._due is not None:
            for session in list(self._due.sessions):
                self.evict(session.key)
            self._due = None

    def step_behind(self, batch: Batch) -> LookaheadStep | None:
        """One more step of all sessions of a batch that runs; None if one of them may not have it yet."""
        step = batch.plain
        if step is None or self._due is not None or not self._lookahead.is_possible:
            return None
        if any(request.status is not RequestStatus.ABORTED for request in batch.prefills):
            return None  # the rest of a prompt does not wait for it
        num_unasked = self._num_unasked([*self._computed, step])
        if self._may_grow and any(len(self._to_follow(one, num_unasked)) for one in self._computed):
            return None  # sessions wait to be served beside it
        own = [step.sessions[place] for place in np.flatnonzero(step.is_here).tolist()]
        if not all(session.lookahead_credit for session in own):
            return None
        if num_unasked and any(num_unasked[session.key] >= MAX_STEPS_AHEAD for session in own):
            return None
        indices = np.flatnonzero(step.is_here & (step.bases + 1 < step.own.max_lengths))
        if not len(indices):
            return None
        selected = step.own if len(indices) == len(step) else step.own.selected(indices)
        unknown = np.zeros(len(indices), dtype=np.int64)
        return LookaheadStep(selected, step.bases[indices] + 1, unknown, indices.tolist(), is_queued=True)

    # Steps under way.

    def note_start(self, batch: Batch, step: LookaheadStep) -> None:
        """A step was started, or queued behind the one that runs."""
        if step.is_queued:
            self._queued = batch
        else:
            self._running, self._due = batch, None

    def with_removed_rows(self, batch: Batch, output: ExecutorOutput[Any]) -> ExecutorOutput[Any]:
        """The output of a batch, with results for those requests that were rows of its step: sessions that have left,
        or whose row has failed.
        """
        step, outcome = batch.plain, output.plain
        if step is None or outcome is None:
            return output
        for place in outcome.errors:
            if step.is_here[place]:
                self.evict(step.sessions[place].key)
        step.outcome = outcome
        results: list[Any] = [outcome.errors.get(place) or step.answer(place) for place in batch.removed_rows]
        return replace(output, results=[*output.results, *results])

    def finish(self, batch: Batch, step: LookaheadStep, forward: ForwardRecord) -> list[LookaheadAnswers]:
        """A step is computed: the answers to what was asked; the others are held."""
        self._running, step.forward = None, forward
        if step.outcome is None:
            raise ValueError("a step that is not computed has no answers")
        step.is_open = step.is_here & step.own.do_not_end(step.outcome.token_ids, step.bases)
        self._computed.append(step)
        self._may_grow = True
        return self._answered(step, np.flatnonzero(step.is_here & step.is_asked))

    def resolve(self, queued: Batch, before: LookaheadStep) -> None:
        """The step before a queued one is computed: its tokens are known, and it runs."""
        step, outcome = queued.plain, before.outcome
        if step is None or outcome is None:
            raise ValueError("a step is resolved by one that is computed")
        self._queued, self._running = None, queued
        indices = np.asarray(step.indices, dtype=np.intp)
        step.is_queued, step.tokens = False, outcome.token_ids[indices]
        is_right = step.own.do_not_end(step.tokens, before.bases[indices]) & (step.tokens == outcome.drawn[indices])
        is_gone = [not self._table.holds(session) for session in step.sessions]
        is_right &= ~np.array(is_gone, dtype=np.bool_)
        if not is_right.all():
            self._drop_wrong(step, is_right, is_gone, outcome.errors, indices)
        kept = np.flatnonzero(is_right).tolist()
        sessions = [step.sessions[place] for place in kept]
        self._executor.amend_plain(sessions, step.tokens[is_right].tolist())
        for session in sessions:
            session.lookahead_credit = max(0, session.lookahead_credit - 1)
        before.is_open[indices[is_right]] = False
        is_leaving = is_right & ~before.is_here[indices]
        step.is_here = is_right.copy()
        queued.run([], self._clock())
        for place in np.flatnonzero(is_leaving).tolist():
            self._leave_running(queued, step, place)
        self._drop_done()

    def _drop_wrong(
        self, step: LookaheadStep, is_right: Bools, is_gone: Sequence[bool], errors: Container[int], indices: Rows
    ) -> None:
        for place in np.flatnonzero(~is_right).tolist():
            self._stats.num_lookahead_unused += 1
            if not is_gone[place] and int(indices[place]) not in errors:
                session = step.sessions[place]
                self._table.truncate([session], [int(step.bases[place]) - 1])

    def _answered(self, step: LookaheadStep, indices: Rows) -> list[LookaheadAnswers]:
        """Commit what was asked for and is computed."""
        if not len(indices):
            self._drop_done()
            return []
        for place, base in zip(indices.tolist(), step.bases[indices].tolist(), strict=True):
            self._table.commit(step.sessions[place], base)
        self._drop_done()
        return [LookaheadAnswers(step, indices)]

    def _drop_done(self) -> None:
        self._computed = [step for step in self._computed if step.is_needed]

    # Items.

    def take(self, link_id: int, batched: ScoreBatch, arrived_ns: int) -> tuple[list[LookaheadAnswers], Bools]:
        """Find what arrays ask for: the answers to what is computed, and which rows were found."""
        is_taken = np.zeros(len(batched), dtype=np.bool_)
        answers: list[LookaheadAnswers] = []
        if not self._members or batched.support_counts is not None or batched.hidden_states_from is not None:
            return answers, is_taken
        for step, indices, rows in self._asked_of(link_id, batched):
            fits = self._fit(step, indices, rows, batched)
            if fits.any():
                is_taken[rows[fits]] = True
                answers += self._ask(step, indices[fits], rows[fits], batched, arrived_ns)
        return answers, is_taken

    def _asked_of(self, link_id: int, batched: ScoreBatch) -> Iterable[tuple[LookaheadStep, Rows, Rows]]:
        """Steps, their rows, and the rows of arrays that may ask for them: of each session the oldest that was not
        asked for.
        """
        steps = [step for step in (*self._computed, *self._under_way()) if step.unasked.any()]
        if not steps:
            return []
        first, count = steps[0], len(batched)
        is_whole = len(first) == count and np.array_equal(first.own.numbers, batched.sessions)  # as nearly always
        if is_whole and first.unasked.all() and (first.own.link_ids == link_id).all():
            return [(first, np.arange(count), np.arange(count))]
        numbers = batched.sessions.tolist()
        if len(set(numbers)) < count:
            return []
        found: list[tuple[LookaheadStep, Rows, Rows]] = []
        left = dict(enumerate(numbers))
        for step in steps:
            unasked = step.unasked.tolist()
            pairs = [
                (place, row)
                for row, number in left.items()
                if (place := step.place_of((link_id, number))) is not None and unasked[place]
            ]
            for _, row in pairs:
                del left[row]
            if pairs:
                indices, rows = np.array(pairs, dtype=np.intp).T
                found.append((step, indices, rows))
        return found

    def _fit(self, step: LookaheadStep, indices: Rows, rows: Rows, batched: ScoreBatch) -> Bools:
        """True if rows of arrays ask for just what was prepared."""
        kept = step.bases[indices] - 1
        counts, starts = batched.counts, batched.counts.cumsum() - batched.counts
        at = np.minimum(starts[rows], max(0, batched.token_ids.size - 1))
        fits: Bools = (counts[rows] == 1) & (batched.draft_lengths[rows] == 0) & (batched.num_kept_tokens[rows] == kept)
        has_chain = batched.num_kept_tokens >= BLOCK_TOKENS
        if not batched.token_ids.size or len(batched.chains) != CHAIN_BYTES * int(has_chain.sum()):
            return np.zeros(len(indices), dtype=np.bool_)
        fits &= batched.token_ids[at] == step.tokens[indices]
        sessions = [step.sessions[place] for place in indices.tolist()]
        newest = np.array([session.generation for session in sessions], dtype=np.uint64)
        fits &= batched.generations[rows] >= newest
        prefix_hash = self._table.prefix_hash
        hashes = [prefix_hash(session, length) for session, length in zip(sessions, kept.tolist(), strict=True)]
        fits &= batched.hash_tails[rows] == np.array([rest for _, rest in hashes], dtype=np.uint64)
        given = np.zeros((len(batched), CHAIN_BYTES), dtype=np.uint8)
        given[has_chain] = np.frombuffer(batched.chains, dtype=np.uint8).reshape(-1, CHAIN_BYTES)
        fits &= (given[rows] == chain_rows([chain for chain, _ in hashes])).all(axis=1)
        return fits

    def _ask(
        self, step: LookaheadStep, indices: Rows, rows: Rows, batched: ScoreBatch, arrived_ns: int
    ) -> list[LookaheadAnswers]:
        """Rows of arrays have asked for what lies at these indices of a step."""
        generations = batched.generations[rows]
        if batched.trace_parents:
            step.trace_parents[indices] = [batched.trace_parents[row] for row in rows.tolist()]
        step.is_asked[indices], step.generations[indices] = True, generations
        step.arrived_ns[indices] = arrived_ns
        for place, generation in zip(indices.tolist(), generations.tolist(), strict=True):
            session = step.sessions[place]
            session.generation, session.used_ns = generation, arrived_ns
        self._stats.num_lookahead_used += len(indices)
        self._may_grow = True
        if step.outcome is None:
            return []
        step.is_late[indices] = True
        return self._answered(step, indices)

    # Sessions that leave.

    def evict(self, key: SessionKey) -> None:
        """Return of a session to requests: something else than what was prepared has come, or it ends."""
        if key not in self._members:
            return
        self._members.discard(key)
        for step in self._computed:
            if (place := step.place_of(key)) is not None:
                step.is_here[place] = False
                if not step.is_asked[place]:
                    request = self._request(step, place)
                    request.answer = step.answer(place)
                    self._queue.hold(request)
        running = None if self._running is None else self._running.plain
        if self._running is not None and running is not None and (place := running.place_of(key)) is not None:
            self._leave_running(self._running, running, place)
        if self._due is not None and (place := self._due.place_of(key)) is not None:
            self._due.is_here[place] = False
            request = self._request(self._due, place)
            request.job = self._executor.begin(request.session, request.item)
            self._queue.put(request)
        self._drop_done()

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        for key in [key for key in self._members if key[0] == link_id]:
            self.evict(key)

    def _leave_running(self, batch: Batch, step: LookaheadStep, place: int) -> None:
        self._members.discard(step.sessions[place].key)
        step.is_here[place] = False
        request = self._request(step, place)
        request.status, request.num_batches = RequestStatus.RUNNING, 1
        self._queue.put(request)
        batch.scheduled.append((request, 1))
        batch.removed_rows.append(place)

    def _go_on_alone(self, step: LookaheadStep, place: int) -> None:
        """The next step of a session is prepared as a single item."""
        session, is_asked = step.sessions[place], bool(step.is_asked[place])
        self.evict(session.key)
        request = self._queue.last_prepared(session.key)
        if request is None or is_asked:
            request = self._request(step, place)
            request.answer = step.answer(place)
        self._lookahead.prepare(request)

    def _request(self, step: LookaheadStep, place: int) -> AnyRequest:
        """The request that a single item would have made of a row."""
        session, is_asked = step.sessions[place], bool(step.is_asked[place])
        item = step.item(place, self._table.prefix_hash(session, int(step.bases[place]) - 1))
        arrived_ns = int(step.arrived_ns[place]) if is_asked else self._clock()
        request: AnyRequest = Request(session, item, RunningJob(), arrived_ns, is_asked=is_asked)
        if step.forward is not None:
            request.note_forward(step.forward)
        return request


def _forward_of(request: AnyRequest) -> tuple[int, int, int]:
    """End, sessions and tokens of the last forward that has served the request."""
    return request.waiting_since_ns, request.batch_size, request.num_tokens


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
