"""The synchronous heart of a service: commands in, one forward a step, events out.

Owns the order of things: which items are taken, which jobs wait, who is served by the next forward, what is reported.
What an item means and how its tokens are computed is the ``Stage``'s. Deterministic and without threads;
``outrider.engine.worker`` gives it one. Refuses to know models, devices and transports.

Where the stage can tell what it will be asked next, that is computed before it is asked for: the forward is started
while the answers of the last one are on their way, and who then asks for just that finds it under way or done. Who asks
for anything else is served as if nothing had been foreseen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from outrider.engine.activity import Activity
from outrider.engine.chunk_size import ChunkSize
from outrider.engine.foresight import Foresight
from outrider.engine.ledger import Ledger, Session, SessionKey
from outrider.engine.patience import LONGEST_ABSENCE_NS, Patience
from outrider.engine.pending import Pending
from outrider.engine.scheduling import DEFAULT_PREFILL_BESIDE, is_running, share_tokens
from outrider.engine.stage import AheadStage, EventT, Flight, Following, ItemT, JobT, Pass, Stage, TextT
from outrider.engine.trouble import log_trouble
from outrider.errors import OutriderError
from outrider.ports import EventBatch, ForwardReport, Open, Refused, Release, SessionFailed, SessionLost
from outrider.recording import ItemRecord, PassRecord, Recorder

DEFAULT_MAX_BATCHED_TOKENS = 512
_LOOK_S = 20e-6
"""How often one looks whether a forward that was started is done, at least."""

CommonEvent = SessionLost | SessionFailed | Refused


@dataclass(frozen=True, slots=True)
class _Started(Generic[TextT, ItemT, JobT, EventT]):
    """A forward under way."""

    flight: Flight[EventT]
    served: list[tuple[Pending[TextT, ItemT, JobT], int]]
    keys: frozenset[SessionKey]
    started_ns: int
    num_running: int
    num_chunk_tokens: int
    """Of prompts."""


class ServiceCore(Generic[TextT, ItemT, JobT, EventT]):
    """Implements ``outrider.engine.worker.Core`` over a ledger and a stage."""

    def __init__(
        self,
        ledger: Ledger[TextT],
        stage: Stage[TextT, ItemT, JobT, EventT],
        *,
        ahead: AheadStage[TextT, ItemT, JobT, EventT] | None = None,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_prefill_beside: int = DEFAULT_PREFILL_BESIDE,
        adapts_chunks: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``ahead`` is the stage once more, if it is to compute what was not asked for yet; ``adapts_chunks`` where a
        chunk's time is not its tokens' alone, as on a GPU.
        """
        self.ledger = ledger
        self.activity = Activity()
        self.recorder: Recorder | None = None
        """Told of traced items; set before the first message, if at all."""
        self._stage, self._ahead = stage, ahead
        self._max_batched_tokens = max_batched_tokens
        self._chunk_size = ChunkSize(max_prefill_beside)
        self._adapts_chunks = adapts_chunks
        self._clock = clock
        self._ready: dict[int, list[EventT | CommonEvent]] = {}
        self._ran_ns = -LONGEST_ABSENCE_NS
        """When a running session was served last."""
        self._patience = Patience()
        self._foresight = Foresight()
        # In the order in which they were last served, longest ago first.
        self._pending: dict[SessionKey, Pending[TextT, ItemT, JobT]] = {}
        self._early: dict[SessionKey, tuple[Pending[TextT, ItemT, JobT], EventT]] = {}
        """Computed, and not asked for yet."""
        self._found: list[tuple[Pending[TextT, ItemT, JobT], EventT]] = []
        """Asked for after they were computed, and to be told."""
        self._started: _Started[TextT, ItemT, JobT, EventT] | None = None
        self._following: Following[JobT, EventT] | None = None
        """One more step of those that are under way, started too."""
        self._deferred: list[tuple[int, ItemT, int]] = []
        """Of sessions that a forward under way serves with something else: link, item, arrival."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._ready or self._found or self._pending or self._started)

    @property
    def pause_s(self) -> float:
        """For how long there had better be no step, in seconds: while a forward is under way, and while prompts had
        better wait for running sessions.
        """
        if self._ready or self._found:
            return 0.0
        if self._started is not None:
            return 0.0 if self._started.flight.is_done() else _LOOK_S
        if any(is_running(pending.job) for pending in self._pending.values()):
            return 0.0
        return 1e-9 * self._patience.wait_ns(self._clock())

    def handle(
        self, link_id: int, commands: Sequence[Open | Release | ItemT], *, arrived_ns: int | None = None
    ) -> None:
        """Take in one message of a link; computes nothing."""
        arrived = self._clock() if arrived_ns is None else arrived_ns
        for command in commands:
            if isinstance(command, Open):
                self._open(link_id, command)
            elif isinstance(command, Release):
                self._release(link_id, command)
            else:
                self._item(link_id, command, arrived)
        self._follow()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self.ledger)

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self._stage.num_pages_free

    def refuse_sessions(self, reason: str) -> None:
        """Refuse new sessions from now on."""
        self.ledger.refuse_sessions(reason)

    def drop_link(self, link_id: int) -> None:
        """Release everything that the link holds."""
        for key in [key for key in (*self._pending, *self._early) if key[0] == link_id]:
            self._give_up(key, "link closed")
        self._ready.pop(link_id, None)
        gone = [pending for pending, _ in self._found if pending.session.link_id == link_id]
        self._found = [entry for entry in self._found if entry[0].session.link_id != link_id]
        for pending in gone:
            if pending.record is not None:
                self._record_end(pending, pending.record, self._clock(), "link closed", is_answered=False)
        self._deferred = [entry for entry in self._deferred if entry[0] != link_id]
        self._patience.drop_link(link_id)
        self._foresight.drop_link(link_id)
        self.ledger.drop_link(link_id)

    def step(self) -> list[tuple[int, EventBatch[EventT | CommonEvent]]]:
        """Answers that needed no forward, if there are any; otherwise one forward and what it answers."""
        if self._ready or self._found:
            return self._tell()
        started = self._started or self._start()
        if started is None:
            return []
        self._started = None
        answers = self._finish(started)
        # Before the answers are put into words: the device need not wait for that.
        if self._following is not None:
            self._board(started, answers)
        else:
            self._go_ahead(answers)
        return self._batches(answers)

    # What arrives.

    def _open(self, link_id: int, command: Open) -> None:
        event = self.ledger.open(link_id, command)
        self.activity.note_opened(event, is_ending=self.ledger.is_closed)
        self._cancel_stale((link_id, command.session))
        self._note_end((link_id, command.session))  # of what it was before, if it was anything
        if event is not None:
            self._answer(link_id, event, command)

    def _release(self, link_id: int, command: Release) -> None:
        if self.ledger.release(link_id, command):
            self._give_up((link_id, command.session), "released")
            self._note_end((link_id, command.session))

    def _item(self, link_id: int, item: ItemT, arrived_ns: int) -> None:
        session = self.ledger.find(link_id, item.session, item.generation)
        if session is None:
            return
        if isinstance(session, SessionLost):
            self._note_end((link_id, item.session))
            self._answer(link_id, session, trace_parent=item.trace_parent)
            return
        self._patience.note_return(session.key, arrived_ns)
        if self._take_foreseen(session.key, item, arrived_ns):
            return
        if self._is_under_way(session):
            self._deferred.append((link_id, item, arrived_ns))
            return
        self._give_up(session.key, "superseded")
        try:
            answer: EventT | CommonEvent | None = self._stage.check(session, item)
        except OutriderError as error:
            answer = self.ledger.fail(link_id, item.session, item.generation, error)
        else:
            answer = answer or self.ledger.rewind(session, item.base_length, item.prefix_hash)
        if answer is not None:
            self._note_end(session.key)
            self._answer(link_id, answer, session.open)
            return
        job = self._stage.begin(session, item)
        self._foresight.note_item(session.key, job)
        record = self._record_of(item, arrived_ns)
        self._pending[session.key] = Pending(session, item.generation, job, arrived_ns, arrived_ns, record)

    def _take_foreseen(self, key: SessionKey, item: ItemT, arrived_ns: int) -> bool:
        """Whether this is the item that was foreseen; its answer is under way then, or found."""
        pending = self._pending.get(key) or self._early.get(key, (None,))[0]
        if self._ahead is None or pending is None or pending.foreseen is None:
            return False
        if not self._ahead.is_foreseen(item, pending.foreseen):
            return False
        pending.ask(item, arrived_ns, self._record_of(item, arrived_ns))
        self.activity.num_foreseen_used += 1
        if key in self._early:
            event = self._as_asked(*self._early.pop(key))
            self._found.append((pending, event))
            self._foresee(pending, event)
        return True

    def _is_under_way(self, session: Session[TextT]) -> bool:
        """Whether a forward reads the session's text just now."""
        pending = self._pending.get(session.key)
        return self._started is not None and session.key in self._started.keys and pending is not None

    def _take_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for link_id, item, arrived_ns in deferred:
            self._item(link_id, item, arrived_ns)

    def _record_of(self, item: ItemT, arrived_ns: int) -> ItemRecord | None:
        if item.trace_parent and self.recorder is not None and self.recorder.wants(item.trace_parent):
            return ItemRecord(item.trace_parent, item.session, item.generation, arrived_ns)
        return None

    # What ends without an answer.

    def _cancel_stale(self, key: SessionKey) -> None:
        """Drop a job whose session was opened anew, failed or went."""
        pending = self._pending.get(key) or self._early.get(key, (None,))[0]
        if pending is not None and not self.ledger.holds(pending.session):
            self._give_up(key, "session closed")

    def _give_up(self, key: SessionKey, why: str) -> None:
        """Drop a job, if there is one, without an answer."""
        early, _ = self._early.pop(key, (None, None))
        pending = self._pending.pop(key, None) or early
        if pending is not None and pending.foreseen is not None:
            self.activity.num_foreseen_unused += 1
        if pending is not None and pending.record is not None:
            self._record_end(pending, pending.record, self._clock(), why, is_answered=False)

    def _note_end(self, key: SessionKey) -> None:
        self._patience.note_end(key)
        self._foresight.note_end(key)

    def _record_end(
        self, pending: Pending[TextT, ItemT, JobT], record: ItemRecord, now_ns: int, outcome: str, *, is_answered: bool
    ) -> None:
        record.ended_ns, record.outcome = now_ns, outcome
        record.timing = pending.timing(now_ns) if is_answered else None
        if self.recorder is not None:
            self.recorder.ended(record)

    # One forward.

    def _start(self) -> _Started[TextT, ItemT, JobT, EventT] | None:
        started_ns = self._clock()
        served = self._choose(started_ns)
        if not served:
            return None
        shares = [(pending.job, share) for pending, share in served]
        flight = self._ahead.start(shares) if self._ahead is not None else _AtOnce(self._stage, shares)
        keys = frozenset(pending.session.key for pending, _ in served)
        num_running = sum(is_running(pending.job) for pending, _ in served)
        num_chunk_tokens = sum(share for pending, share in served if not is_running(pending.job))
        return _Started(flight, served, keys, started_ns, num_running, num_chunk_tokens)

    def _choose(self, now_ns: int) -> list[tuple[Pending[TextT, ItemT, JobT], int]]:
        waiting = list(self._pending.values())
        shares = share_tokens(
            [pending.job for pending in waiting],
            self._max_batched_tokens,
            max_beside=self._chunk_size.tokens,
            is_beside=now_ns - self._ran_ns < LONGEST_ABSENCE_NS,
        )
        return [(pending, share) for pending, share in zip(waiting, shares, strict=True) if share]

    def _finish(
        self, started: _Started[TextT, ItemT, JobT, EventT]
    ) -> list[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]]:
        outcome = started.flight.finish()
        ended = self._clock()
        self._note_duration(started, ended)
        num_tokens = sum(share for _, share in started.served)
        found = PassRecord(
            started.started_ns, outcome.computed_ns, ended, len(started.served), num_tokens, outcome.used_graph
        )
        waits_ns = []
        for pending, _ in started.served:
            is_first = pending.queue_ns is None and pending.foreseen is None
            pending.note_pass(found)
            if is_first:
                waits_ns.append(pending.queue_ns or 0)
        self.activity.note_forward(found, waits_ns)
        answers = self._settle([pending for pending, _ in started.served], outcome.results)
        for pending, event in answers:
            if not isinstance(event, SessionFailed):
                self._patience.note_answer(pending.session.key, ended)
        return answers

    def _note_duration(self, started: _Started[TextT, ItemT, JobT, EventT], ended_ns: int) -> None:
        duration_ns = ended_ns - started.started_ns
        if started.num_running:
            self._ran_ns = ended_ns
            if self._adapts_chunks:
                self._chunk_size.note_forward(duration_ns, started.num_chunk_tokens)
        if started.num_chunk_tokens:
            self._patience.note_chunk(duration_ns)
        elif all(is_running(pending.job) for pending in self._pending.values()):
            self._chunk_size.note_end_of_prompts()

    def _settle(
        self,
        served: Sequence[Pending[TextT, ItemT, JobT]],
        results: Sequence[EventT | OutriderError | None],
    ) -> list[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]]:
        answers: list[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]] = []
        for pending, result in zip(served, results, strict=True):
            key = pending.session.key
            if self._pending.get(key) is not pending:
                continue  # given up while the forward was under way
            del self._pending[key]
            if result is None:
                self._pending[key] = pending  # to the back
            elif pending.foreseen is not None:
                self._keep(pending, result)
            elif isinstance(result, OutriderError):
                failure = self.ledger.fail(*key, pending.generation, result)
                self._note_end(key)
                self.activity.note_answer(failure)
                log_trouble(failure, pending.session.open)
                answers.append((pending, failure))
            else:
                answers.append((pending, self._as_asked(pending, result)))
        return answers

    # What was not asked for yet.

    def _go_ahead(self, answers: Sequence[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]]) -> None:
        """Start what will be asked for after these answers."""
        self._take_deferred()
        foreseen = [self._foresee(pending, event) for pending, event in answers]
        if any(foreseen) and self._ahead is not None and self._ahead.is_asynchronous:
            self._started = self._start()

    def _follow(self) -> None:
        """Once all that is under way was asked for, and nobody waits for anything else, the step after it may be
        started too: the device then goes from one to the other.
        """
        started = self._started
        if self._ahead is None or started is None or self._following is not None or self._deferred:
            return
        if len(self._pending) > len(started.served):
            return
        for pending, _ in started.served:
            key = pending.session.key
            if self._pending.get(key) is not pending or pending.foreseen is not None or not self._foresight.allows(key):
                return
        self._following = self._ahead.follow(started.flight)

    def _board(
        self,
        before: _Started[TextT, ItemT, JobT, EventT],
        answers: Sequence[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]],
    ) -> None:
        """What followed is under way now."""
        following, self._following, now = self._following, None, self._clock()
        if following is None or self._ahead is None:
            return
        told = {pending.session.key: event for pending, event in answers}
        served = []
        for index, (job, place) in enumerate(zip(following.jobs, following.places, strict=True)):
            session, event = before.served[place][0].session, told.get(before.served[place][0].session.key)
            pending: Pending[TextT, ItemT, JobT] = Pending(session, session.generation, job, now, now, None)
            if event is not None and not isinstance(event, SessionLost | SessionFailed | Refused):
                pending.foreseen = self._ahead.confirm(following, index, session, event)
            if pending.foreseen is not None:
                self._pending[session.key] = pending
            else:
                self.activity.num_foreseen_unused += 1
            served.append((pending, 1))
        keys = frozenset(pending.session.key for pending, _ in served)
        self._started = _Started(following.flight, served, keys, now, len(served), 0)
        self._take_deferred()

    def _foresee(self, pending: Pending[TextT, ItemT, JobT], event: EventT | CommonEvent) -> bool:
        """Whether the session's next item can be told from its answer; it waits to be computed then."""
        session = pending.session
        if self._ahead is None or session.key in self._pending or not self._foresight.allows(session.key):
            return False
        if isinstance(event, SessionLost | SessionFailed | Refused):
            return False
        item = self._ahead.foresee(session, event)
        if item is None:
            return False
        job, now = self._ahead.begin(session, item), self._clock()
        self._pending[session.key] = Pending(session, pending.generation, job, now, now, None, foreseen=item)
        return True

    def _as_asked(self, pending: Pending[TextT, ItemT, JobT], event: EventT) -> EventT:
        """The answer to a foreseen item is one to the item that came."""
        return event if self._ahead is None or pending.asked is None else self._ahead.answer_to(pending.asked, event)

    def _keep(self, pending: Pending[TextT, ItemT, JobT], result: EventT | OutriderError) -> None:
        """Of an error nothing is said until somebody asks, who then has it anew."""
        if isinstance(result, OutriderError):
            self.activity.num_foreseen_unused += 1
        else:
            self._early[pending.session.key] = pending, result

    # What is told.

    def _answer(
        self, link_id: int, event: EventT | CommonEvent, opening: Open | None = None, *, trace_parent: str = ""
    ) -> None:
        self.activity.note_answer(event)
        log_trouble(event, opening, trace_parent)
        self._ready.setdefault(link_id, []).append(event)

    def _tell(self) -> list[tuple[int, EventBatch[EventT | CommonEvent]]]:
        ready, self._ready = self._ready, {}
        found, self._found = self._found, []
        told: list[tuple[int, EventBatch[EventT | CommonEvent]]] = [
            (link_id, EventBatch(tuple(events))) for link_id, events in ready.items()
        ]
        return told + self._batches(found)

    def _batches(
        self, answers: Sequence[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]]
    ) -> list[tuple[int, EventBatch[EventT | CommonEvent]]]:
        links = dict.fromkeys(pending.session.link_id for pending, _ in answers)
        return [
            (link_id, self._batch([one for one in answers if one[0].session.link_id == link_id])) for link_id in links
        ]

    def _batch(
        self, answers: Sequence[tuple[Pending[TextT, ItemT, JobT], EventT | CommonEvent]]
    ) -> EventBatch[EventT | CommonEvent]:
        now = self._clock()
        timings = tuple(pending.timing(now) for pending, _ in answers)
        for pending, event in answers:
            if pending.record is not None:
                pending.record.error = event.message if isinstance(event, SessionFailed) else ""
                self._record_end(pending, pending.record, now, type(event).__name__, is_answered=True)
        report = ForwardReport(
            queue_ns=max(timing.queue_ns for timing in timings),
            forward_ns=max(timing.forward_ns for timing in timings),
            sample_ns=max(timing.sample_ns for timing in timings),
            total_ns=max(timing.total_ns for timing in timings),
            batch_size=max(pending.batch_size for pending, _ in answers),
            num_tokens=max(pending.num_tokens for pending, _ in answers),
            num_pages_free=self._stage.num_pages_free,
        )
        return EventBatch(tuple(event for _, event in answers), report, timings)


@dataclass(frozen=True, slots=True)
class _AtOnce(Generic[JobT, EventT]):
    """A forward of a stage that does not start one and finish it later."""

    stage: Stage[Any, Any, JobT, EventT]
    shares: list[tuple[JobT, int]]

    def is_done(self) -> bool:
        return True

    def finish(self) -> Pass[EventT]:
        return self.stage.advance(self.shares)
