"""The synchronous heart of a service: commands in, one forward a step, events out.

Owns the order of things: which items are taken, which jobs wait, who is served by the next forward, what is reported.
What an item means and how its tokens are computed is the ``Stage``'s. Deterministic and without threads;
``outrider.engine.worker`` gives it one. Refuses to know models, devices and transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.engine.activity import Activity
from outrider.engine.ledger import Ledger, Session, SessionKey, Text
from outrider.engine.patience import LONGEST_ABSENCE_NS, Patience
from outrider.engine.scheduling import DEFAULT_PREFILL_BESIDE, Job, is_running, share_tokens
from outrider.engine.trouble import log_trouble
from outrider.errors import OutriderError
from outrider.ports import EventBatch, ForwardReport, ItemTiming, Open, Refused, Release, SessionFailed, SessionLost
from outrider.recording import ItemRecord, PassRecord, Recorder

DEFAULT_MAX_BATCHED_TOKENS = 512


class Item(Protocol):
    """What ``Extend`` and ``Score`` have in common."""

    @property
    def session(self) -> int:
        """The session's number on its link."""
        ...

    @property
    def generation(self) -> int:
        """The item's."""
        ...

    @property
    def base_length(self) -> int:
        """Tokens to keep."""
        ...

    @property
    def prefix_hash(self) -> int:
        """Of those."""
        ...

    @property
    def trace_parent(self) -> str:
        """Empty when it is not traced."""
        ...


TextT = TypeVar("TextT", bound=Text)
ItemT = TypeVar("ItemT", bound=Item)
JobT = TypeVar("JobT", bound=Job)
EventT = TypeVar("EventT")
ItemT_contra = TypeVar("ItemT_contra", bound=Item, contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)

CommonEvent = SessionLost | SessionFailed | Refused


@dataclass(frozen=True, slots=True)
class Pass(Generic[EventT_co]):
    """What came of one forward."""

    results: Sequence[EventT_co | OutriderError | None]
    """For each job served: its answer, why its session fails, or None when it goes on."""
    computed_ns: int
    """When the model was done with it and sampling began, by the core's clock, which is ``time.perf_counter_ns``."""
    used_graph: bool = False
    """Whether a captured forward was replayed."""


class Stage(Protocol[TextT, ItemT_contra, JobT, EventT_co]):
    """What a service does with an item."""

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        ...

    def check(self, session: Session[TextT], item: ItemT_contra) -> EventT_co | None:
        """An answer that needs no forward, or None; ``InvalidRequestError`` for a bad item. Changes nothing."""
        ...

    def begin(self, session: Session[TextT], item: ItemT_contra) -> JobT:
        """What is to be computed, now that the session's text was cut to the item's base."""
        ...

    def advance(self, shares: Sequence[tuple[JobT, int]]) -> Pass[EventT_co]:
        """One forward over so many tokens of each of these jobs."""
        ...


@dataclass(slots=True)
class _Pending(Generic[TextT, JobT]):
    session: Session[TextT]
    generation: int
    job: JobT
    arrived_ns: int
    left_ns: int
    """When it was last touched: its arrival, or the end of the last forward that served it."""
    record: ItemRecord | None
    """None when it is not traced."""
    queue_ns: int | None = None
    forward_ns: int = 0
    sample_ns: int = 0
    wait_ns: int = 0

    def note_pass(self, started_ns: int, computed_ns: int, ended_ns: int) -> None:
        """A forward served it. Each stage lies between two readings of the clock; none is what the others leave."""
        idle = started_ns - self.left_ns
        if self.queue_ns is None:
            self.queue_ns = idle
        else:
            self.wait_ns += idle
        self.forward_ns += computed_ns - started_ns
        self.sample_ns += ended_ns - computed_ns
        self.left_ns = ended_ns

    def timing(self, now_ns: int) -> ItemTiming:
        """Where its time went, if it is answered now."""
        return ItemTiming(
            queue_ns=self.queue_ns or 0,
            forward_ns=self.forward_ns,
            sample_ns=self.sample_ns,
            wait_ns=self.wait_ns + now_ns - self.left_ns,
            total_ns=now_ns - self.arrived_ns,
        )


class ServiceCore(Generic[TextT, ItemT, JobT, EventT]):
    """Implements ``outrider.engine.worker.Core`` over a ledger and a stage."""

    def __init__(
        self,
        ledger: Ledger[TextT],
        stage: Stage[TextT, ItemT, JobT, EventT],
        *,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_prefill_beside: int = DEFAULT_PREFILL_BESIDE,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.ledger = ledger
        self.activity = Activity()
        self.recorder: Recorder | None = None
        """Told of traced items; set before the first message, if at all."""
        self._stage = stage
        self._max_batched_tokens = max_batched_tokens
        self._max_prefill_beside = max_prefill_beside
        self._clock = clock
        self._ready: dict[int, list[EventT | CommonEvent]] = {}
        self._ran_ns = -LONGEST_ABSENCE_NS
        """When a running session was served last."""
        self._patience = Patience()
        # In the order in which they were last served, longest ago first.
        self._pending: dict[SessionKey, _Pending[TextT, JobT]] = {}

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._ready or self._pending)

    @property
    def pause_s(self) -> float:
        """For how long prompts had better wait for running sessions, in seconds; 0 when these are among what waits."""
        if self._ready or any(is_running(pending.job) for pending in self._pending.values()):
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
        for key in [key for key in self._pending if key[0] == link_id]:
            self._give_up(key, "link closed")
        self._ready.pop(link_id, None)
        self._patience.drop_link(link_id)
        self.ledger.drop_link(link_id)

    def step(self) -> list[tuple[int, EventBatch[EventT | CommonEvent]]]:
        """Answers that needed no forward, if there are any; otherwise one forward and what it answers."""
        if self._ready:
            ready, self._ready = self._ready, {}
            return [(link_id, EventBatch(tuple(events))) for link_id, events in ready.items()]
        started = self._clock()
        served = self._choose(started)
        if not served:
            return []
        running = [pending for pending, _ in served if is_running(pending.job)]
        waits_ns = [started - pending.arrived_ns for pending, _ in served if pending.queue_ns is None]
        outcome = self._stage.advance([(pending.job, share) for pending, share in served])
        computed, ended = outcome.computed_ns, self._clock()
        if running:
            self._ran_ns = ended
        if len(running) < len(served):
            self._patience.note_chunk(ended - started)
        num_tokens = sum(share for _, share in served)
        self.activity.note_forward(waits_ns, len(served), num_tokens, computed - started, ended - computed)
        for pending, _ in served:
            pending.note_pass(started, computed, ended)
        records = [pending.record for pending, _ in served if pending.record]
        if records:
            found = PassRecord(started, computed, ended, len(served), num_tokens, outcome.used_graph, records)
            for record in records:
                record.passes.append(found)
        answers = self._settle([pending for pending, _ in served], outcome.results)
        for pending, event in answers:
            if not isinstance(event, SessionFailed):
                self._patience.note_answer(pending.session.key, ended)
        return [
            (link_id, self._batch(link_id, answers, batch_size=len(served), num_tokens=num_tokens))
            for link_id in dict.fromkeys(pending.session.link_id for pending, _ in answers)
        ]

    def _open(self, link_id: int, command: Open) -> None:
        event = self.ledger.open(link_id, command)
        self.activity.note_opened(event, is_ending=self.ledger.is_closed)
        self._cancel_stale((link_id, command.session))
        if event is not None:
            self._answer(link_id, event, command)

    def _release(self, link_id: int, command: Release) -> None:
        if self.ledger.release(link_id, command):
            self._give_up((link_id, command.session), "released")
            self._patience.note_end((link_id, command.session))

    def _item(self, link_id: int, item: ItemT, arrived_ns: int) -> None:
        session = self.ledger.find(link_id, item.session, item.generation)
        if session is None:
            return
        if isinstance(session, SessionLost):
            self._answer(link_id, session, trace_parent=item.trace_parent)
            return
        self._patience.note_return(session.key, arrived_ns)
        self._give_up(session.key, "superseded")
        try:
            answer: EventT | CommonEvent | None = self._stage.check(session, item)
        except OutriderError as error:
            answer = self.ledger.fail(link_id, item.session, item.generation, error)
        else:
            answer = answer or self.ledger.rewind(session, item.base_length, item.prefix_hash)
        if answer is not None:
            self._answer(link_id, answer, session.open)
            return
        job = self._stage.begin(session, item)
        record = None
        if item.trace_parent and self.recorder is not None and self.recorder.wants(item.trace_parent):
            record = ItemRecord(item.trace_parent, item.session, item.generation, arrived_ns)
        self._pending[session.key] = _Pending(session, item.generation, job, arrived_ns, arrived_ns, record)

    def _cancel_stale(self, key: SessionKey) -> None:
        """Drop a job whose session was opened anew, failed or went."""
        pending = self._pending.get(key)
        if pending is not None and not self.ledger.holds(pending.session):
            self._give_up(key, "session closed")

    def _give_up(self, key: SessionKey, why: str) -> None:
        """Drop a job, if there is one, without an answer."""
        pending = self._pending.pop(key, None)
        if pending is not None and pending.record is not None:
            self._record_end(pending.record, self._clock(), None, why)

    def _record_end(self, record: ItemRecord, now_ns: int, timing: ItemTiming | None, outcome: str) -> None:
        record.ended_ns, record.timing, record.outcome = now_ns, timing, outcome
        if self.recorder is not None:
            self.recorder.ended(record)

    def _answer(
        self, link_id: int, event: EventT | CommonEvent, opening: Open | None = None, *, trace_parent: str = ""
    ) -> None:
        self.activity.note_answer(event)
        log_trouble(event, opening, trace_parent)
        self._ready.setdefault(link_id, []).append(event)

    def _choose(self, now_ns: int) -> list[tuple[_Pending[TextT, JobT], int]]:
        waiting = list(self._pending.values())
        jobs = [pending.job for pending in waiting]
        shares = share_tokens(
            jobs,
            self._max_batched_tokens,
            max_beside=self._max_prefill_beside,
            is_beside=now_ns - self._ran_ns < LONGEST_ABSENCE_NS,
        )
        return [(pending, share) for pending, share in zip(waiting, shares, strict=True) if share]

    def _settle(
        self, served: Sequence[_Pending[TextT, JobT]], results: Sequence[EventT | OutriderError | None]
    ) -> list[tuple[_Pending[TextT, JobT], EventT | CommonEvent]]:
        answers: list[tuple[_Pending[TextT, JobT], EventT | CommonEvent]] = []
        for pending, result in zip(served, results, strict=True):
            key = pending.session.key
            del self._pending[key]
            if result is None:
                self._pending[key] = pending  # to the back
            elif isinstance(result, OutriderError):
                failure = self.ledger.fail(*key, pending.generation, result)
                self.activity.note_answer(failure)
                log_trouble(failure, pending.session.open)
                answers.append((pending, failure))
            else:
                answers.append((pending, result))
        return answers

    def _batch(
        self,
        link_id: int,
        answers: Sequence[tuple[_Pending[TextT, JobT], EventT | CommonEvent]],
        *,
        batch_size: int,
        num_tokens: int,
    ) -> EventBatch[EventT | CommonEvent]:
        mine = [(pending, event) for pending, event in answers if pending.session.link_id == link_id]
        now = self._clock()
        timings = tuple(pending.timing(now) for pending, _ in mine)
        for (pending, event), timing in zip(mine, timings, strict=True):
            if pending.record is not None:
                pending.record.error = event.message if isinstance(event, SessionFailed) else ""
                self._record_end(pending.record, now, timing, type(event).__name__)
        report = ForwardReport(
            queue_ns=max(timing.queue_ns for timing in timings),
            forward_ns=max(timing.forward_ns for timing in timings),
            sample_ns=max(timing.sample_ns for timing in timings),
            total_ns=max(timing.total_ns for timing in timings),
            batch_size=batch_size,
            num_tokens=num_tokens,
            num_pages_free=self._stage.num_pages_free,
        )
        return EventBatch(tuple(event for _, event in mine), report, timings)
