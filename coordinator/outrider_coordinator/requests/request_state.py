"""One request on its way through the coordinator: its state machine, what it tells, its timers.

Owns what turns the state machine's output into what a user holds. Sends nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from outrider.errors import IntegrityError, OutriderError
from outrider.generation import Delta, GenerationResult, Progress, Usage
from outrider.ports import DraftCommand, DraftEvent, ItemTiming, Opened, Proposal, Scores, TargetCommand, TargetEvent
from outrider_coordinator.acceptance import Verdict
from outrider_coordinator.requests.deadline_timer import DeadlineTimer
from outrider_coordinator.requests.output_collector import OutputCollector
from outrider_coordinator.routing.services import DraftReplica, TargetReplica
from outrider_coordinator.session.actions import Emit, Fail, Finish
from outrider_coordinator.session.loop import SessionLoop, Waiting
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.stats.request_log import log_ending, log_trouble
from outrider_coordinator.stats.request_timings import RequestTimings
from outrider_coordinator.tracing import RequestTrace
from outrider_coordinator.tracing.requests import NOT_TRACED
from outrider_coordinator.tracing.watching import WatchedStep

_log = logging.getLogger(__name__)


class RequestState:
    """A request taken in. At its end it knows how it ended, and nothing is left to cancel."""

    def __init__(
        self, loop: SessionLoop, latency_histograms: LatencyHistograms | None = None, trace: RequestTrace = NOT_TRACED
    ) -> None:
        """``latency_histograms`` counts the request's times beside those of others."""
        self.loop = loop
        self.trace = trace
        loop.trace_items(trace.trace_parent)
        loop.name_trace(trace.trace_id)
        self.session = -1
        """Its number on the links while it runs."""
        self.target: TargetReplica | None = None
        """Where it lives, while it runs and there is one for it."""
        self.draft: DraftReplica | None = None
        self.num_moves = 0
        """How often it was given a target."""
        self.refused_by: set[TargetReplica] = set()
        """Targets without room for it, since it was last parked or found room."""
        self.request_timings = RequestTimings(latency_histograms)
        self.log_fields: dict[str, str] = {"request_id": loop.plan.request_id, **trace.log_fields}
        """Said in every line of the log about it."""
        self._output_collector = OutputCollector(loop.output.take_text, num_tokens=len(loop.plan.emitted_token_ids))
        self.draft_wait_began: float | None = None
        """When it began to wait for a proposal that has not come; by the event loop's clock."""
        self._draft_timer = DeadlineTimer()
        self._timers: set[asyncio.TimerHandle] = set()
        """Those that have not rung."""

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return self.loop.waiting is Waiting.NOTHING

    def deltas(self) -> AsyncIterator[Delta]:
        """New output as it comes; the last delta carries the result. Raises the error the request ends with."""
        return self._output_collector.deltas()

    def admit(self) -> None:
        """Note that it runs."""
        self.request_timings.note_admitted()
        if self.trace.notes is not None:
            self.trace.notes.admitted()

    def hear_target(self, event: TargetEvent, verdict: Verdict | None = None) -> None:
        """Hand the state machine what the target says, and the verdict if it has been reached already."""
        if not isinstance(event, Scores | Opened):
            log_trouble("target", event)
        self.loop.on_target_event(event, verdict)

    def hear_draft(self, event: DraftEvent, *, is_sound: bool = False) -> None:
        """Hand the state machine what the draft says, and whether a proposal has been checked already."""
        if not isinstance(event, Proposal | Opened):
            log_trouble("draft", event)
        self.loop.on_draft_event(event, is_sound=is_sound)

    def lose_target(self) -> None:
        """The target's link is gone."""
        _log.info("the session's target is gone: it goes on, rebuilt, when there is one for it")
        self.loop.target_lost()

    def lose_draft(self) -> None:
        """The draft's link is gone."""
        _log.info("the session's draft is gone: it goes on without until there is one for it")
        self.loop.draft_lost()

    def deliver(self, event: Callable[[], None], timing: ItemTiming | None = None) -> None:
        """Hand an event to the state machine, and note where the time went."""
        loop, notes = self.loop, self.trace.notes
        watched = None if notes is None else WatchedStep(loop, notes)
        waited_for, step = loop.waiting, loop.step
        arrived = self.request_timings.now()
        try:
            event()
        except OutriderError as error:
            loop.fail(error)
        except Exception as error:
            _log.exception("a session failed")
            loop.fail(IntegrityError(f"the coordinator failed: {type(error).__name__}"))
        if loop.step != step or loop.waiting is not waited_for:
            self._note_wait(waited_for, arrived, timing)
        if watched is not None:
            watched.note()

    def _note_wait(self, waited_for: Waiting, arrived: float, timing: ItemTiming | None) -> None:
        now = self.request_timings.now()
        if waited_for is Waiting.TARGET:
            self.request_timings.note_judged(now - arrived)
            self.request_timings.end_wait(now, arrived, timing, is_draft=False)
        elif waited_for is Waiting.DRAFT:
            self.request_timings.end_wait(now, arrived, timing, is_draft=True)

    def note_sent(self, command: DraftCommand | TargetCommand) -> None:
        """A command of this request goes out."""
        if self.trace.notes is not None:
            self.trace.notes.sent(command)

    def emit(self, emit: Emit) -> None:
        """Note new output; it goes out with the next ``flush``, or with the end."""
        if emit.token_ids:
            self.request_timings.note_output()
        self._output_collector.put(emit, self._progress() if self.loop.plan.tells_progress else None)

    def end(self, ending: Finish | Fail) -> None:
        """The last output, with the result or the error."""
        self._cancel_timers()
        self.request_timings.note_end(self.loop.spec_stats.num_emitted_tokens)
        self.trace.ended(self.loop, ending)
        log_ending(self.loop, ending, self.request_timings.summary())
        self._output_collector.end(ending.error if isinstance(ending, Fail) else self._result(ending))

    def flush(self) -> None:
        """Let the user have new output, and book its times: what can wait until the services are told to go on."""
        self._output_collector.release()
        self.request_timings.book()

    def set_draft_timer(self, delay_s: float, ring: Callable[[], None]) -> None:
        """Replace the draft's timer."""
        self.draft_wait_began = asyncio.get_running_loop().time()
        self._draft_timer.set(delay_s, ring)

    def end_draft_wait(self) -> float:
        """How long ago it began to wait for the proposal that has come, in seconds; 0 if it did not wait."""
        began, self.draft_wait_began = self.draft_wait_began, None
        return 0.0 if began is None else asyncio.get_running_loop().time() - began

    def clear_draft_timer(self) -> None:
        """Stop the draft's timer, if it runs."""
        self._draft_timer.clear()

    def call_later(self, delay_s: float, ring: Callable[[], None]) -> None:
        """Call after a while, unless the request is over by then."""

        def ring_once() -> None:
            self._timers.discard(timer)
            ring()

        timer = asyncio.get_running_loop().call_later(delay_s, ring_once)
        self._timers.add(timer)

    def _cancel_timers(self) -> None:
        self._draft_timer.cancel()
        for timer in self._timers:
            timer.cancel()

    def _progress(self) -> Progress:
        return Progress(self.loop.spec_stats.summary(), self.request_timings.summary())

    def _result(self, finish: Finish) -> GenerationResult:
        loop, plan = self.loop, self.loop.plan
        return GenerationResult(
            text=loop.output.text,
            token_ids=loop.tokens.output,
            finish_reason=finish.reason,
            matched_stop=finish.matched_stop,
            logprobs=loop.output.logprobs,
            prompt_logprobs=loop.prompt_logprobs,
            usage=Usage(len(plan.prompt_token_ids), loop.tokens.num_output, loop.num_cached_prompt_tokens or 0),
            speculation=loop.spec_stats.summary(),
            seed=plan.seed,
            request_id=plan.request_id,
            timing=self.request_timings.summary(),
            trace_id=self.trace.trace_id,
        )
