"""The synchronous heart of a service: commands in, one forward a step, events out.

Owns the order of things: which items are taken, which jobs wait, who is served by the next forward, what is reported.
What an item means and how its tokens are computed is the ``Stage``'s. Deterministic and without threads;
``outrider.engine.worker`` gives it one. Refuses to know models, devices and transports.

Where the stage can tell what it will be asked next, that is computed before it is asked for: the forward is started
while the answers of the last one are on their way, and the one after it is queued behind it. Who then asks for just
that finds it under way or done; who asks for anything else is served as if nothing had been foreseen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic

from outrider.engine.activity import Activity
from outrider.engine.chunk_size import ChunkSize
from outrider.engine.early import Early
from outrider.engine.flights import AtOnce, Started
from outrider.engine.foresight import Foresight
from outrider.engine.ledger import Ledger, Session, SessionKey
from outrider.engine.patience import LONGEST_ABSENCE_NS, Patience
from outrider.engine.pending import Pending
from outrider.engine.punctual import LOOK_S
from outrider.engine.scheduling import DEFAULT_PREFILL_BESIDE, is_running, share_tokens
from outrider.engine.stage import AheadStage, EventT, Following, ItemT, JobT, Stage, TextT
from outrider.engine.telling import Answered, CommonEvent, Settled, Telling, Told
from outrider.engine.trouble import log_trouble
from outrider.errors import OutriderError
from outrider.ports import Open, Release, SessionFailed, SessionLost
from outrider.recording import PassRecord, Recorder

DEFAULT_MAX_BATCHED_TOKENS = 512
_MOST_AHEAD = 2
"""Steps of a session that are computed or being computed, and not asked for: the coordinator has two forwards' time to
ask, and who ends unforeseen wastes no more than two rows."""


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
        self._telling: Telling[TextT, ItemT, JobT, EventT] = Telling(self.activity, clock, lambda: stage.num_pages_free)
        self._stage, self._ahead = stage, ahead
        self._max_batched_tokens = max_batched_tokens
        self._chunk_size = ChunkSize(max_prefill_beside)
        self._adapts_chunks = adapts_chunks
        self._clock = clock
        self._ran_ns = -LONGEST_ABSENCE_NS
        """When a running session was served last."""
        self._patience = Patience()
        self._foresight = Foresight()
        # In the order in which they were last served, longest ago first.
        self._pending: dict[SessionKey, Pending[TextT, ItemT, JobT]] = {}
        self._early: Early[TextT, ItemT, JobT, EventT] = Early()
        self._started: Started[TextT, ItemT, JobT, EventT] | None = None
        self._following: Following[JobT, EventT] | None = None
        """One more step of those that are under way, queued behind them."""
        self._may_queue = False
        """Something has happened since it was last tried to queue one."""
        self._deferred: list[tuple[int, ItemT, int]] = []
        """Of sessions that a forward under way serves with something else: link, item, arrival."""

    @property
    def recorder(self) -> Recorder | None:
        """Told of traced items; set before the first message, if at all."""
        return self._telling.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._telling.recorder = recorder

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._telling.has_any or self._pending or self._started)

    @property
    def pause_s(self) -> float:
        """For how long there had better be no step, in seconds: while a forward is under way, and while prompts had
        better wait for running sessions.
        """
        if self._telling.has_any:
            return 0.0
        if self._started is not None:
            return 0.0 if self._may_queue or self._started.flight.is_done() else LOOK_S
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
        self._may_queue = self._started is not None

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
        for key in [key for key in (*self._pending, *self._early.keys()) if key[0] == link_id]:
            self._give_up(key, "link closed")
        self._telling.drop_link(link_id)
        self._deferred = [entry for entry in self._deferred if entry[0] != link_id]
        self._patience.drop_link(link_id)
        self._foresight.drop_link(link_id)
        self.ledger.drop_link(link_id)

    def step(self) -> Told[EventT]:
        """Answers that needed no forward, if there are any; otherwise one forward and what it answers. A forward that
        goes on by itself is begun, followed by another and ended in steps of their own, so that what arrives meanwhile
        is taken in.
        """
        if self._telling.has_any:
            return self._telling.take()
        if self._started is None:
            self._started = self._start()
            if self._started is None or self._goes_on_alone:
                return []
        elif self._may_queue:
            self._queue()
            return []
        return self._end()

    # What arrives.

    def _open(self, link_id: int, command: Open) -> None:
        event = self.ledger.open(link_id, command)
        self.activity.note_opened(event, is_ending=self.ledger.is_closed)
        self._cancel_stale((link_id, command.session))
        self._note_end((link_id, command.session))  # of what it was before, if it was anything
        if event is not None:
            self._telling.put(link_id, event, command)

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
            self._telling.put(link_id, session, trace_parent=item.trace_parent)
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
            self._telling.put(link_id, answer, session.open)
            return
        job = self._stage.begin(session, item)
        self._foresight.note_item(session.key, job)
        record = self._telling.record_of(item, arrived_ns)
        self._pending[session.key] = Pending(session, item.generation, job, arrived_ns, arrived_ns, record)

    def _take_foreseen(self, key: SessionKey, item: ItemT, arrived_ns: int) -> bool:
        """Whether this is the item that was foreseen; its answer is under way then, or found."""
        pending = self._known(key)
        if self._ahead is None or pending is None or pending.foreseen is None:
            return False
        if not self._ahead.is_foreseen(item, pending.foreseen):
            return False
        pending.ask(item, arrived_ns, self._telling.record_of(item, arrived_ns))
        self.activity.num_foreseen_used += 1
        if key in self._early:
            found = self._early.pop(key)
            self._telling.put_found(pending, self._as_asked(*found))
            self._foresee(*(self._early.last(key) or found))
        return True

    def _is_under_way(self, session: Session[TextT]) -> bool:
        """Whether a forward reads the session's text just now."""
        pending = self._pending.get(session.key)
        return self._started is not None and session.key in self._started.keys and pending is not None

    def _take_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for link_id, item, arrived_ns in deferred:
            self._item(link_id, item, arrived_ns)

    # What ends without an answer.

    def _cancel_stale(self, key: SessionKey) -> None:
        """Drop a job whose session was opened anew, failed or went."""
        pending = self._known(key)
        if pending is not None and not self.ledger.holds(pending.session):
            self._give_up(key, "session closed")

    def _known(self, key: SessionKey) -> Pending[TextT, ItemT, JobT] | None:
        """A session's item, whether it was computed before it came, is under way, or waits: the first, if several are
        computed ahead.
        """
        return self._early.first(key) or self._pending.get(key)

    def _give_up(self, key: SessionKey, why: str) -> None:
        """Drop a session's jobs, if there are any, without an answer."""
        dropped = self._early.drop(key)
        if (pending := self._pending.pop(key, None)) is not None:
            dropped.append(pending)
        for pending in dropped:
            self.activity.num_foreseen_unused += pending.foreseen is not None
            self._telling.end_unanswered(pending, why)

    def _note_end(self, key: SessionKey) -> None:
        self._patience.note_end(key)
        self._foresight.note_end(key)

    # One forward.

    @property
    def _goes_on_alone(self) -> bool:
        """Whether a forward, once started, needs no step until it has ended."""
        return self._ahead is not None and self._ahead.is_asynchronous

    def _start(self) -> Started[TextT, ItemT, JobT, EventT] | None:
        started_ns = self._clock()
        served = self._choose(started_ns)
        if not served:
            return None
        shares = [(pending.job, share) for pending, share in served]
        flight = self._ahead.start(shares) if self._ahead is not None else AtOnce(self._stage, shares)
        self._may_queue = self._goes_on_alone
        return Started.of(flight, served, started_ns)

    def _choose(self, now_ns: int) -> list[tuple[Pending[TextT, ItemT, JobT], int]]:
        waiting = list(self._pending.values())
        shares = share_tokens(
            [pending.job for pending in waiting],
            self._max_batched_tokens,
            max_beside=self._chunk_size.tokens,
            is_beside=now_ns - self._ran_ns < LONGEST_ABSENCE_NS,
        )
        return [(pending, share) for pending, share in zip(waiting, shares, strict=True) if share]

    def _end(self) -> Told[EventT]:
        """The forward under way, to its end; what comes next is begun."""
        started, self._started = self._started, None
        if started is None:
            return []
        answers, kept = self._finish(started)
        # Before the answers are put into words: the device need not wait for that.
        if self._following is not None:
            self._board(started, [*answers, *kept])
        else:
            self._go_ahead([*answers, *kept])
        return self._telling.batches(answers)

    def _finish(self, started: Started[TextT, ItemT, JobT, EventT]) -> Settled[TextT, ItemT, JobT, EventT]:
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
        answers, kept = self._settle([pending for pending, _ in started.served], outcome.results)
        for pending, event in answers:
            if not isinstance(event, SessionFailed):
                self._patience.note_answer(pending.session.key, ended)
        return answers, kept

    def _note_duration(self, started: Started[TextT, ItemT, JobT, EventT], ended_ns: int) -> None:
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
    ) -> Settled[TextT, ItemT, JobT, EventT]:
        answers: list[Answered[TextT, ItemT, JobT, EventT]] = []
        kept: list[Answered[TextT, ItemT, JobT, EventT]] = []
        for pending, result in zip(served, results, strict=True):
            key = pending.session.key
            if self._pending.get(key) is not pending:
                continue  # given up while the forward was under way
            del self._pending[key]
            if result is None:
                self._pending[key] = pending  # to the back
            elif isinstance(result, OutriderError):
                if (failure := self._fail(pending, result)) is not None:
                    answers.append((pending, failure))
            elif pending.foreseen is not None:
                self._early.put(pending, result)
                kept.append((pending, result))
            else:
                answers.append((pending, self._as_asked(pending, result)))
        return answers, kept

    def _fail(self, pending: Pending[TextT, ItemT, JobT], error: OutriderError) -> SessionFailed | None:
        """What is to be told of an error; nothing until somebody has asked, who then has it anew."""
        if pending.foreseen is not None:
            self.activity.num_foreseen_unused += 1
            return None
        failure = self.ledger.fail(*pending.session.key, pending.generation, error)
        self._note_end(pending.session.key)
        self.activity.note_answer(failure)
        log_trouble(failure, pending.session.open)
        return failure

    # What was not asked for yet.

    def _go_ahead(self, answers: Sequence[Answered[TextT, ItemT, JobT, EventT]]) -> None:
        """Start what will be asked for after these answers."""
        self._take_deferred()
        foreseen = [self._foresee(pending, event) for pending, event in answers]
        if any(foreseen) and self._goes_on_alone:
            self._started = self._start()

    def _queue(self) -> None:
        """Start the step after those that are under way, unless somebody waits for anything else: the device then goes
        from one to the other.
        """
        self._may_queue = False
        started = self._started
        if self._ahead is None or started is None or self._following is not None or self._deferred:
            return
        if len(self._pending) == len(started.served) and all(self._may_go_on(pending) for pending, _ in started.served):
            self._following = self._ahead.follow(started.flight)

    def _may_go_on(self, pending: Pending[TextT, ItemT, JobT]) -> bool:
        """Whether the step after this one, which is under way, may be computed before it is asked for."""
        key = pending.session.key
        num_ahead = self._early.count(key) + (pending.foreseen is not None)
        return self._pending.get(key) is pending and self._foresight.allows(key) and num_ahead < _MOST_AHEAD

    def _board(
        self,
        before: Started[TextT, ItemT, JobT, EventT],
        answers: Sequence[Answered[TextT, ItemT, JobT, EventT]],
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
            if event is not None and not isinstance(event, CommonEvent):
                pending.foreseen = self._ahead.confirm(following, index, session, event)
            if pending.foreseen is not None:
                self._pending[session.key] = pending
            else:
                self.activity.num_foreseen_unused += 1
            served.append((pending, 1))
        self._started, self._may_queue = Started.of(following.flight, served, now), True
        self._take_deferred()

    def _foresee(self, pending: Pending[TextT, ItemT, JobT], event: EventT | CommonEvent) -> bool:
        """Whether the session's next item can be told from its answer; it waits to be computed then."""
        session = pending.session
        if self._ahead is None or session.key in self._pending or not self._foresight.allows(session.key):
            return False
        if isinstance(event, CommonEvent) or self._early.count(session.key) == _MOST_AHEAD:
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
