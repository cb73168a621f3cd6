"""Engine core of a service: commands in, one step at a time, events out.

A step schedules a batch, executes it and processes its outputs. ``CommandProcessor`` turns commands into requests,
``Scheduler`` chooses the batch, the service's ``Executor`` computes it, ``OutputProcessor`` makes messages of the
answers. Deterministic and without threads: ``outrider.serving.in_process`` gives it one. Knows no models, devices and
transports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

from outrider.batched import CommandBatch, ScoreBatch
from outrider.errors import OutriderError
from outrider.ports import EventBatch, Open, Prepare, Rejected, Release
from outrider.proposal_channel.pushes import ChainStart, Pushes
from outrider.proposal_channel.verdicts import Verdicts
from outrider.recording import Recorder
from outrider.serving.command_processor import CommandProcessor
from outrider.serving.decode.steps import DecodeBatches
from outrider.serving.executor import EventT, Executor, ItemT, JobT, References
from outrider.serving.idle_sessions import IdleSessions
from outrider.serving.output_processor import Messages, OutputProcessor
from outrider.serving.request import AnyRequest, Batch, FinishedBatch
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import SequenceT, Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats
from outrider.serving.token_budget import TokenBudget
from outrider.timer_slack import POLL_INTERVAL_S

_MAX_STEPS_WITHOUT_FORWARD = 32
"""Events that need no forward leave first, for no more steps in a row: a link that asks for nothing else holds up no
other.
"""
_EVENTS_OF_STEP = 64
"""Number of events without a forward that count as a step of their own."""
_COMPILING_S = 15.0
"""Longest time of the first forward of a size on a GPU, which compiles kernels for it."""


class EngineCore(Generic[SequenceT, ItemT, JobT, EventT]):
    """Implements ``outrider.serving.in_process.engine_thread.Core`` over a session registry and an executor."""

    def __init__(
        self,
        sessions: SessionRegistry[SequenceT],
        executor: Executor[SequenceT, ItemT, JobT, EventT],
        budget: TokenBudget | None = None,
        *,
        lookahead: bool = False,
        takes_batch: bool = True,
        references: References | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``lookahead``: a ``Prepare`` is served, where the executor can tell what the next step is.
        ``takes_batch``: what comes as arrays is served as such where it can be.

        ``references``: bring in what items refer to; None: they refer to nothing.
        """
        self.sessions = sessions
        self.stats = stats = ServiceStats()
        self.executor, self._clock, self._references = executor, clock, references
        self.in_flight: deque[Batch] = deque()
        """Batches that were started, oldest first: one, and with lookahead one more queued behind it."""
        self._oldest: Batch | None = None
        """Batch whose forward is being started or in flight, the oldest of them; read by other threads."""
        self._num_ended = self._num_reported = 0
        """Forwards that have ended, and messages that needed none."""
        self._num_steps_without_forward = 0
        self.send_verdicts: Callable[[Messages], Messages] = lambda messages: messages
        """Sends the verdicts of messages, and returns these; called before a step that is begun by itself."""
        self._answered: list[AnyRequest] = []
        """Requests answered in the newest step, with work left for when their answers have been sent."""
        self._outputs = OutputProcessor(stats, clock, lambda: executor.num_pages_unused)
        self.scheduler = Scheduler(
            sessions,
            executor,
            budget or TokenBudget(),
            lookahead=lookahead,
            preempt=self._preempt,
            stats=stats,
            clock=clock,
        )
        self._inputs = CommandProcessor(
            sessions, executor, self.scheduler, self._outputs, stats, references=references, invalidate=self._invalidate
        )
        self.decode = DecodeBatches(
            sessions,
            executor,
            self.scheduler,
            self._outputs,
            stats=stats,
            is_enabled=takes_batch,
            take_item=self._inputs.item,
            references=references,
            clock=clock,
        )
        self._idle = IdleSessions(
            sessions,
            is_busy=self._is_asked,
            end=self._inputs.expire,
            clock=clock,
        )

    # A step.

    def step(self) -> list[tuple[int, EventBatch[Any]]]:
        """Schedule a batch, execute it, process its outputs; returns messages, each with the number of its link.

        A forward of an asynchronous executor outlives the step that starts it. Meanwhile steps take in what arrives and
        may queue a batch behind it; the first one after its end processes its outputs. Events that need no forward
        leave in steps of their own.
        """
        if self._outputs.is_ready and not self._is_forward_overdue:
            if not self.executor.is_asynchronous:
                self._answered = self._outputs.finished
            messages = self._outputs.take()
            self._num_reported += 1
            num_events = sum([len(batch.events) for _, batch in messages])
            self._num_steps_without_forward += 1 + num_events // _EVENTS_OF_STEP
            return messages
        self._num_steps_without_forward = 0
        batch = None
        if not self.in_flight:
            batch = self.decode.next_batch(self._clock()) or self.decode.batch_ahead(self._clock())
        batch = batch or self.scheduler.schedule(self.in_flight)
        if batch is None and not self.in_flight:  # last: chains go on as long as their sessions do
            batch = self.decode.chain_batch(self._clock())
        finished = self._execute(batch)
        return self._process_outputs(finished)

    def _execute(self, batch: Batch | None) -> FinishedBatch | None:
        """Start a batch, if there is one; the oldest batch in flight if its forward has ended, else None."""
        if batch is not None and self._start(batch) and self.executor.is_asynchronous:
            return None
        if not self.in_flight or not self.in_flight[0].forward.is_done():
            return None
        return self._finish()

    def _finish(self) -> FinishedBatch:
        """Wait for the oldest batch in flight."""
        batch = self.in_flight[0]
        output = batch.forward.finish()
        self.in_flight.popleft()
        self._oldest = self.in_flight[0] if self.in_flight else None
        self._num_ended += 1
        return FinishedBatch(batch, output, self._clock())

    def _start(self, batch: Batch) -> bool:
        """Start a batch; False where the executor cannot queue it behind the one in flight."""
        self._oldest = self._oldest or batch
        if batch.decode is not None:
            self.decode.start(batch, batch.decode)
        elif batch.after is None:
            batch.run(batch.scheduled, batch.started_ns)
            jobs = [(request.job, tokens) for request, tokens in batch.scheduled]
            step = batch.plain
            batch.forward = self.executor.start(jobs) if step is None else self.executor.start_step(step, jobs)
        else:
            queued = self.executor.queue(batch.after.forward, batch.plain)
            if queued is None:
                return False
            batch.queued, batch.forward = queued, queued.forward
        if batch.plain is not None:
            self.scheduler.plain.note_start(batch, batch.plain)
        if not self.in_flight:
            self.scheduler.note_begin(batch, batch.started_ns)
        self.in_flight.append(batch)
        if self.executor.is_asynchronous:
            self.scheduler.learn()
            for request in batch.prefills:
                self.executor.look_ahead(request.job)
        return True

    def _process_outputs(
        self, finished: FinishedBatch | None, *, may_go_on: bool = True
    ) -> list[tuple[int, EventBatch[Any]]]:
        """Answer the requests of a batch. The next batch starts before messages are made of the answers, so that the
        device does not wait for that.
        """
        if finished is None:
            return []
        batch, output = finished.batch, finished.output
        self._outputs.note_forward(batch)
        if batch.decode is not None and output.batched is not None:
            messages = self.decode.answer(batch, batch.decode, output, finished.ended_ns)
            self._outputs.note_ahead(batch)
            if may_go_on and self.executor.is_asynchronous and not self.in_flight and self.decode.ahead.is_due:
                messages = self.send_verdicts(messages)
                following = self.decode.batch_ahead(self._clock())
                if following is not None:
                    self._start(following)
            return messages
        if batch.decode is not None:
            if self.decode.give_up(batch, output):
                return []
            self.decode.split_running()
        output = self.scheduler.plain.with_removed_rows(batch, output.one_by_one())
        answered = [
            self._answer(request, result) for request, result in self.scheduler.update(batch, output, finished.ended_ns)
        ]
        self._outputs.note_ahead(batch)
        in_arrays = self.scheduler.finish_plain(batch, finished.ended_ns)
        for link_id, event in output.pushed:
            self._outputs.put(link_id, event)
        self._start_next(batch, finished.ended_ns)
        self._answered = answered
        return self._outputs.messages(answered, in_arrays)

    def post_step(self) -> None:
        """Do what no answer waits for; called when the messages of a step have left."""
        answered, self._answered = self._answered, []
        self.decode.postprocess()
        self.decode.register(answered)
        self._outputs.hand_over_records()
        if not self.executor.is_asynchronous:  # else it has learned while the device computed
            self.scheduler.learn()

    def _answer(self, request: AnyRequest, result: EventT | OutriderError) -> AnyRequest:
        if isinstance(result, OutriderError):
            failure = self._inputs.fail(request, result)
            self._outputs.note(failure, request.session.open)
            request.finish(failure)
        else:
            self.sessions.commit(request.session, result.base_length)
            request.finish(result)
        return request

    def _start_next(self, before: Batch, ended_ns: int) -> None:
        """Go on after a batch that has ended, with the one queued behind it or with steps that it says are next."""
        if self.in_flight:
            queued = self.in_flight[0]
            if queued.after is not None and before.plain is not None:
                self.scheduler.plain.resolve(queued, before.plain)
            elif queued.after is not None:
                self.scheduler.lookahead.resolve(queued, before)
            else:
                self.scheduler.note_begin(queued, ended_ns)
        self._inputs.take_superseding(before.requests)
        if not self.in_flight and self.scheduler.lookahead.is_possible:
            # What superseded an answered item may have failed its session.
            open_yet = [request for request in before.requests if self.sessions.holds(request.session)]
            alone = self.scheduler.plain.join(open_yet)
            prepared = [self.scheduler.lookahead.prepare(request) for request in alone]
            self.scheduler.plain.grow()
            if (any(prepared) or self.scheduler.plain.due is not None) and self.executor.is_asynchronous:
                batch = self.scheduler.schedule(self.in_flight)
                if batch is not None:
                    self._start(batch)

    # Progress, for other threads.

    @property
    def progress(self) -> tuple[bool, int]:
        """Progress: True while a forward is in flight, and a number that rises.

        While a forward is in flight only the end of one is progress.
        """
        return (True, self._num_ended) if self._oldest is not None else (False, self._num_ended + self._num_reported)

    @property
    def longest_forward_s(self) -> float:
        """The longest that the oldest forward in flight may take, as far as is known; 0 without one."""
        oldest = self._oldest
        if oldest is None:
            return 0.0
        times, num_tokens = self.stats.forward_times, oldest.num_computed_tokens
        compiles = self.executor.is_asynchronous and not times.knows(num_tokens)
        return max(times.longest_s(num_tokens), _COMPILING_S if compiles else 0.0)

    # When to take a step.

    @property
    def has_work(self) -> bool:
        """True if ``step`` has anything to do."""
        return bool(self._outputs.is_ready or self._has_forwards)

    @property
    def pause_s(self) -> float:
        """Recommended pause before the next step unless a message arrives, in seconds: while a forward is in flight,
        and while prompts are delayed for running sessions.
        """
        return 0.0 if self._outputs.is_ready else self._forward_pause_s

    @property
    def _forward_pause_s(self) -> float:
        if self.in_flight:
            oldest = self.in_flight[0]
            is_due = oldest.may_queue_next or self.scheduler.are_chunks_due(self.in_flight)
            return 0.0 if is_due or oldest.forward.is_done() else POLL_INTERVAL_S
        if self.decode.is_chain_due:
            return 0.0
        if (pending := self.decode.pending) is not None:
            return self.scheduler.gather_s(pending.keys) if pending.is_asked else 0.0
        if self.decode.ahead.is_due:
            return 1e-9 * self.decode.ahead.pause_ns() if self.scheduler.queue.is_empty else 0.0
        return self.scheduler.delay_s

    @property
    def _is_forward_overdue(self) -> bool:
        """True if a forward is to be started, followed or ended before more events leave that needed none."""
        if self._num_steps_without_forward < _MAX_STEPS_WITHOUT_FORWARD:
            return False
        return self._has_forwards and not self._forward_pause_s

    @property
    def _has_forwards(self) -> bool:
        """True if a forward is to be started, or is in flight."""
        is_busy = self.in_flight or self.decode.pending
        return bool(is_busy or self.decode.is_ahead_due or self.scheduler.queue.due or self.scheduler.plain.is_due)

    # Links.

    def handle(
        self,
        link_id: int,
        commands: Sequence[Open | Release | Rejected | Prepare | ItemT | CommandBatch],
        *,
        arrived_ns: int | None = None,
    ) -> None:
        """Process one message of a link, arrays among its commands; computes nothing."""
        arrived = self._clock() if arrived_ns is None else arrived_ns
        if self.decode.runs_begun and self.decode.adopt(link_id, commands, arrived):
            return
        if self.decode.ahead.has_any:
            commands = self.decode.ahead.claim(link_id, commands, arrived)
            if not commands:
                return
        self._postprocess()
        if self.decode.take_expected(commands, arrived):
            return
        singles, batched, after = self.decode.split(link_id, commands)
        if self._references is not None:
            singles = self._references.fetch_all(singles)
            batched = None if batched is None else self._references.fetch_batch(batched)
        self._inputs.take(link_id, singles, arrived)
        if batched is not None:
            self.decode.take(link_id, batched, arrived, is_free=not self.in_flight)
            self._inputs.take(link_id, after, arrived)
        self.scheduler.plain.grow()
        if len(self.in_flight) == 1:
            self.in_flight[0].may_queue_next = True

    def expect(self, link_id: int, batched: ScoreBatch) -> None:
        """Plan a step of which a later message is expected to bring the draft tokens, if the device is idle."""
        if self.decode.ahead.has_any:
            return
        self._postprocess()
        if not self.in_flight:
            self.decode.expect(link_id, batched)

    def begin(self, link_id: int, said: Verdicts | ChainStart | Pushes, *, is_idle: bool = True) -> None:
        """Prepare for what will be asked for after what came by a proposal channel: verdicts of a target begin
        proposals, if the device is idle; pushes of a draft are kept for steps that are begun by themselves.
        ``is_idle``: nothing else has arrived.
        """
        if isinstance(said, Pushes):
            self.decode.ahead.push(link_id, said)
        elif isinstance(said, ChainStart):
            self._postprocess()
            self.decode.start_chains(link_id, said)
        elif not self.decode.drafts.take(link_id, said) and is_idle:
            self._postprocess()
            if not self.in_flight:
                self.decode.begin(link_id, said, self._clock())

    def drop_link(self, link_id: int) -> None:
        """Release all sessions of the link."""
        self._postprocess()
        self.scheduler.plain.drop_link(link_id)
        self.decode.drop_link(link_id)
        self._inputs.drop_link(link_id)

    def _postprocess(self) -> None:
        """Do what was left for later, before anything else happens; wait for a step that nothing has asked for."""
        if self.decode.runs_begun:
            self._outputs.put_messages(self._process_outputs(self._finish(), may_go_on=False))
            self.post_step()
        self.decode.postprocess()

    # Sessions.

    @property
    def num_sessions(self) -> int:
        """Number of open sessions; thread-safe."""
        return len(self.sessions)

    @property
    def num_pages_free(self) -> int:
        """Number of free KV pages; thread-safe."""
        return self.executor.num_pages_unused

    @property
    def next_check_s(self) -> float | None:
        """Seconds until ``end_idle_sessions`` is due; None while there are no sessions."""
        return self._idle.next_check_s

    def end_idle_sessions(self) -> None:
        """End the sessions that have received nothing for the timeout."""
        self._postprocess()
        self.decode.split_all()
        self._idle.end_all()

    def refuse_sessions(self, reason: str) -> None:
        """Refuse new sessions from now on."""
        self.sessions.refuse_sessions(reason)

    @property
    def recorder(self) -> Recorder | None:
        """Receiver of the records of traced items; set before the first message, if at all."""
        return self._outputs.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._outputs.recorder = recorder

    def _invalidate(self, key: SessionKey, *, is_prepare: bool = False) -> None:
        self.decode.invalidate(key)
        if not is_prepare:
            self.scheduler.plain.evict(key)

    def _preempt(self, session: Session[SequenceT]) -> None:
        self._inputs.preempt(session)

    def _is_asked(self, key: SessionKey) -> bool:
        """True if a session waits for an answer."""
        due = self.scheduler.queue.due_of(key)
        return (due is not None and due.is_asked) or self.scheduler.plain.is_asked(key)
