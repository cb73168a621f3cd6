"""The synchronous heart of a service: commands in, one forward a step, events out.

Owns the order of things: when what has arrived is taken in, when a forward begins and ends, and what becomes of its
results. ``InputProcessor`` takes commands in, ``Scheduler`` chooses and runs one forward after the other,
``LookaheadScheduler`` computes steps ahead of their commands, ``RequestQueue`` holds what waits between them, and the
``Executor`` says what an item means and how its tokens are computed. Deterministic and without threads;
``outrider.serving.worker`` gives it one. Refuses to know models, devices and transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic

from outrider.errors import OutriderError
from outrider.ports import Open, Rejected, Release
from outrider.recording import Recorder
from outrider.serving.executor import AsyncExecutor, EventT, Executor, ItemT, JobT, SequenceT
from outrider.serving.idle_sessions import IdleSessions
from outrider.serving.input_processor import InputProcessor
from outrider.serving.lookahead import LookaheadScheduler
from outrider.serving.output_processor import OutputProcessor, Told
from outrider.serving.preemption import PageBudget, Served
from outrider.serving.prefill_delay import PrefillDelayPolicy
from outrider.serving.request_queue import RequestQueue
from outrider.serving.running_batch import RunningBatch
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.scheduler import FinishedBatch, Scheduler, TokenBudget
from outrider.serving.session_table import SessionKey, SessionTable
from outrider.serving.stats import ServiceStats
from outrider.serving.sync_executor import SyncExecutorAdapter
from outrider.serving.timer_slack import LOOK_S
from outrider.serving.token_budget import DEFAULT_PREFILL_BESIDE, is_running

DEFAULT_MAX_BATCHED_TOKENS = 1024
_MOST_TOLD = 32
"""Answers that need no forward go first, for no more steps in a row: who asks for nothing else holds up nobody."""


class EngineCore(Generic[SequenceT, ItemT, JobT, EventT]):
    """Implements ``outrider.serving.worker.Core`` over a ledger and a stage."""

    def __init__(
        self,
        session_table: SessionTable[SequenceT],
        stage: Executor[SequenceT, ItemT, JobT, EventT],
        *,
        ahead: AsyncExecutor[SequenceT, ItemT, JobT, EventT] | None = None,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_prefill_beside: int = DEFAULT_PREFILL_BESIDE,
        adapts_chunks: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``ahead`` is the stage once more, if it is to compute what was not asked for yet; ``adapts_chunks`` where a
        chunk's time is not its tokens' alone, as on a GPU.
        """
        self.session_table = session_table
        self.activity = activity = ServiceStats()
        self._stage = stage = ahead or SyncExecutorAdapter(stage)
        self._clock = clock
        self._request_queue: RequestQueue[SequenceT, ItemT, JobT, EventT] = RequestQueue()
        self._num_told = 0
        """So many steps in a row were spent on answers that needed no forward."""
        self._prefill_delay = PrefillDelayPolicy()
        self._output_processor: OutputProcessor[SequenceT, ItemT, JobT, EventT] = OutputProcessor(
            activity, clock, lambda: stage.num_pages_free
        )
        self._ahead = LookaheadScheduler(stage, self._request_queue, activity=activity, clock=clock)
        self._page_budget = PageBudget(session_table, stage, self._request_queue, activity)
        budget = TokenBudget(max_batched_tokens, max_prefill_beside, adapts_chunks)
        self._scheduler = Scheduler(
            stage, self._request_queue, self._prefill_delay, budget, fit=self._fit, activity=activity, clock=clock
        )
        self._input_processor = InputProcessor(
            session_table,
            stage,
            self._request_queue,
            ahead=self._ahead,
            telling=self._output_processor,
            budget=self._page_budget,
            prefill_delay=self._prefill_delay,
            activity=activity,
        )
        self._idle = IdleSessions(
            session_table,
            session_table.session_limits.idle_timeout_s,
            is_busy=self._is_asked,
            end=self._input_processor.expire,
            clock=clock,
        )

    @property
    def recorder(self) -> Recorder | None:
        """Told of traced items; set before the first message, if at all."""
        return self._output_processor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._output_processor.recorder = recorder

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self.session_table)

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self._stage.num_pages_free

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._output_processor.has_any or self._request_queue.due or self._scheduler.under_way)

    @property
    def pause_s(self) -> float:
        """For how long there had better be no step, in seconds: while a forward is under way, and while prompts had
        better wait for running sessions.
        """
        return 0.0 if self._output_processor.has_any else self._rest_s

    def handle(
        self, link_id: int, commands: Sequence[Open | Release | Rejected | ItemT], *, arrived_ns: int | None = None
    ) -> None:
        """Take in one message of a link; computes nothing."""
        arrived = self._clock() if arrived_ns is None else arrived_ns
        for command in commands:
            if isinstance(command, Open):
                self._input_processor.open(link_id, command, arrived)
            elif isinstance(command, Release):
                self._input_processor.release(link_id, command)
            elif isinstance(command, Rejected):
                self._input_processor.reject(link_id, command)
            else:
                self._input_processor.item(link_id, command, arrived)
        if (started := self._scheduler.under_way) is not None:
            started.may_be_followed = started.following is None

    @property
    def next_check_s(self) -> float | None:
        """Seconds until ``end_idle_sessions`` is due; None while there are no sessions."""
        return self._idle.next_check_s

    def end_idle_sessions(self) -> None:
        """End the sessions for which nothing has come for too long."""
        self._idle.end_all()

    def refuse_sessions(self, reason: str) -> None:
        """Refuse new sessions from now on."""
        self.session_table.refuse_sessions(reason)

    def drop_link(self, link_id: int) -> None:
        """Release everything that the link holds."""
        self._input_processor.drop_link(link_id)

    def step(self) -> Told[EventT]:
        """Answers that needed no forward, if there are any; otherwise one forward and what it answers. A forward that
        goes on by itself is begun, followed by another and ended in steps of their own, so that what arrives meanwhile
        is taken in.
        """
        if self._output_processor.has_any and not (self._num_told >= _MOST_TOLD and self._may_go_on):
            self._num_told += 1
            return self._output_processor.take()
        self._num_told = 0
        started = self._scheduler.under_way
        if started is None:
            self._scheduler.start()
            started = self._scheduler.under_way
            if started is None or self._scheduler.go_on_alone:
                return []
        elif started.may_be_followed:
            self._ahead.follow(started)
            if started.following is not None or not started.flight.is_done():
                return []
        return self._end(started)

    def _is_asked(self, key: SessionKey) -> bool:
        """Whether a session waits for an answer."""
        due = self._request_queue.due_of(key)
        return due is not None and due.foreseen is None

    def _fit(self, served: Served[SequenceT, ItemT, JobT, EventT]) -> Served[SequenceT, ItemT, JobT, EventT]:
        """What of a forward there are pages for, once the youngest sessions were preempted where that is needed."""
        return self._page_budget.make_room(served, self._input_processor.preempt)

    @property
    def _may_go_on(self) -> bool:
        """Whether a forward is to be begun, followed or ended now."""
        return bool(self._request_queue.due or self._scheduler.under_way) and not self._rest_s

    @property
    def _rest_s(self) -> float:
        """For how long there had better be no forward begun, followed or ended."""
        if (started := self._scheduler.under_way) is not None:
            return 0.0 if started.may_be_followed or started.flight.is_done() else LOOK_S
        if any(is_running(pending.job) for pending in self._request_queue.due):
            return 0.0
        return 1e-9 * self._prefill_delay.wait_ns(self._clock())

    def _end(self, started: RunningBatch[SequenceT, ItemT, JobT, EventT]) -> Told[EventT]:
        """The forward under way, to its end; what comes next is begun."""
        answered = self._settle(self._scheduler.end(started))
        # Before the answers are put into words: the device need not wait for that.
        self._scheduler.under_way = self._ahead.board(started)
        self._input_processor.take_overtaking(started.pendings)
        if self._scheduler.under_way is None:
            foreseen = [self._ahead.foresee(pending) for pending in started.pendings]
            if any(foreseen) and self._scheduler.go_on_alone:
                self._scheduler.start()
        return self._output_processor.batches(answered)

    def _settle(
        self, ended: FinishedBatch[SequenceT, ItemT, JobT, EventT]
    ) -> list[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]:
        """Those who asked and are answered now."""
        answered = []
        for pending, result in zip(ended.started.pendings, ended.results, strict=True):
            if not self._request_queue.take(pending):
                continue  # given up while the forward was under way
            if result is None:
                self._request_queue.put(pending)  # to the back
            elif pending.foreseen is not None:
                self._ahead.keep(pending, result)
            else:
                self._answer(pending, result, ended.ended_ns)
                answered.append(pending)
        return answered

    def _answer(
        self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT], result: EventT | OutriderError, now_ns: int
    ) -> None:
        if isinstance(result, OutriderError):
            pending.answer = self._input_processor.fail(pending, result)
        else:
            pending.answer = self._ahead.as_asked(pending, result)
            self.session_table.commit(pending.session, result.base_length)
            self._prefill_delay.note_answer(pending.session.key, now_ns)
