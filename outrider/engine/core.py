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
from typing import Generic

from outrider.engine.activity import Activity
from outrider.engine.chunk_size import ChunkSize
from outrider.engine.flights import AtOnce, Started
from outrider.engine.foresight import Foresight
from outrider.engine.ledger import Ledger, Session, SessionKey
from outrider.engine.patience import LONGEST_ABSENCE_NS, Patience
from outrider.engine.pending import Pending
from outrider.engine.punctual import LOOK_S
from outrider.engine.scheduling import DEFAULT_PREFILL_BESIDE, is_running, share_tokens
from outrider.engine.stage import AheadStage, EventT, Following, ItemT, JobT, Stage, TextT
from outrider.engine.telling import Answered, CommonEvent, Telling, Told
from outrider.engine.trouble import log_trouble
from outrider.errors import OutriderError
from outrider.ports import Open, Release, SessionFailed, SessionLost
from outrider.recording import PassRecord, Recorder

DEFAULT_MAX_BATCHED_TOKENS = 512


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
        self._early: dict[SessionKey, tuple[Pending[TextT, ItemT, JobT], EventT]] = {}
        """Computed, and not asked for yet."""
        self._started: Started[TextT, ItemT, JobT, EventT] | None = None
        self._following: Following[JobT, EventT] | None = None
        """One more step of those that are under way, started too."""
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
            return 0.0 if self._started.flight.is_done() else LOOK_S
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
        self._telling.drop_link(link_id)
        self._deferred = [entry for entry in self._deferred if entry[0] != link_id]
        self._patience.drop_link(link_id)
        self._foresight.drop_link(link_id)
        self.ledger.drop_link(link_id)

    def step(self) -> Told[EventT]:
        """Answers that needed no forward, if there are any; otherwise one forward and what it answers."""
        if self._telling.has_any:
            return self._telling.take()
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
        return self._telling.batches(answers)

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
            event = self._as_asked(*self._early.pop(key))
            self._telling.put_found(pending, event)
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

    # What ends without an answer.

    def _cancel_stale(self, key: SessionKey) -> None:
        """Drop a job whose session was opened anew, failed or went."""
        pending = self._known(key)
        if pending is not None and not self.ledger.holds(pending.session):
            self._give_up(key, "session closed")

    def _known(self, key: SessionKey) -> Pending[TextT, ItemT, JobT] | None:
        """A session's item, whether it waits, is under way, or was computed before it came."""
        return self._pending.get(key) or self._early.get(key, (None,))[0]

    def _give_up(self, key: SessionKey, why: str) -> None:
        """Drop a job, if there is one, without an answer."""
        early, _ = self._early.pop(key, (None, None))
        pending = self._pending.pop(key, None) or early
        if pending is not None and pending.foreseen is not None:
            self.activity.num_foreseen_unused += 1
        if pending is not None:
            self._telling.end_unanswered(pending, why)

    def _note_end(self, key: SessionKey) -> None:
        self._patience.note_end(key)
        self._foresight.note_end(key)

    # One forward.

    def _start(self) -> Started[TextT, ItemT, JobT, EventT] | None:
        started_ns = self._clock()
        served = self._choose(started_ns)
        if not served:
            return None
        shares = [(pending.job, share) for pending, share in served]
        flight = self._ahead.start(shares) if self._ahead is not None else AtOnce(self._stage, shares)
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

    def _finish(self, started: Started[TextT, ItemT, JobT, EventT]) -> list[Answered[TextT, ItemT, JobT, EventT]]:
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
    ) -> list[Answered[TextT, ItemT, JobT, EventT]]:
        answers: list[Answered[TextT, ItemT, JobT, EventT]] = []
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

    def _go_ahead(self, answers: Sequence[Answered[TextT, ItemT, JobT, EventT]]) -> None:
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
        self._started = Started.of(following.flight, served, now)
        self._take_deferred()

    def _foresee(self, pending: Pending[TextT, ItemT, JobT], event: EventT | CommonEvent) -> bool:
        """Whether the session's next item can be told from its answer; it waits to be computed then."""
        session = pending.session
        if self._ahead is None or session.key in self._pending or not self._foresight.allows(session.key):
            return False
        if isinstance(event, CommonEvent):
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
