"""State of one admitted request: session, place, output, times and timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.generation import GenerationResult, Progress, Usage
from outrider_coordinator.requests.output_collector import OutputCollector
from outrider_coordinator.requests.request_log import log_ending
from outrider_coordinator.routing.placement import Place
from outrider_coordinator.session.actions import Action, DraftWaitEnded, Fail, Finish, StepEnded
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.stats.request_timings import NANOSECONDS, RequestTimings
from outrider_coordinator.tracing import RequestTrace
from outrider_coordinator.tracing.requests import NOT_TRACED

PROGRESS_INTERVAL_S = 0.25
"""Interval of ``Progress`` in a resumable stream: with every delta it took a tenth of the coordinator's time."""


class RequestState:
    """A request from admission to its end."""

    def __init__(
        self, loop: SessionLoop, latency_histograms: LatencyHistograms | None = None, trace: RequestTrace = NOT_TRACED
    ) -> None:
        """``latency_histograms`` counts the request's times beside those of others."""
        self.loop = loop
        self.trace = trace
        loop.commands.trace_parent, loop.commands.trace_id = trace.trace_parent, trace.trace_id
        self.session = -1
        """Session number on the links while it runs."""
        self.place = Place(
            loop.tokens, loop.engine_request.cache_salt, loop.engine_request.max_length, loop.speculation
        )
        self.request_timings = RequestTimings(latency_histograms)
        self.log_fields: dict[str, str] = {"request_id": loop.engine_request.request_id, **trace.log_fields}
        """Fields of every log line about it."""
        self.num_pauses = 0
        """Pauses because its reader was behind."""
        self.draft_wait_began: float | None = None
        """Start of its wait for a proposal that has not come; by the event loop's clock."""
        self.output_collector = OutputCollector(
            loop.output.take_text, num_tokens=len(loop.engine_request.emitted_token_ids)
        )
        self._next_progress = 0.0
        """Time of the next ``Progress``; by the clock of ``note``."""
        self._timers: dict[object, asyncio.TimerHandle] = {}
        """Timers that have not fired."""

    @property
    def has_had_output(self) -> bool:
        """True if output was given to the user; not yet that of an interrupted call."""
        return self.output_collector.has_released

    @property
    def is_over(self) -> bool:
        """True if the request has ended."""
        return self.loop.is_over

    def admit(self) -> None:
        """Record that the request runs."""
        self.request_timings.note_admitted()
        if self.trace.notes is not None:
            self.trace.notes.admitted()

    def note(self, ended: StepEnded | DraftWaitEnded, arrived: float, handled: float) -> None:
        """Count the end of a step or of a wait for a proposal, and queue the step's output, which ``flush`` releases.

        The service's answer was read at ``arrived``; the session's next command was decided at ``handled``.
        """
        timings, is_prefill = self.request_timings, ended.is_prefill
        if isinstance(ended, DraftWaitEnded):
            timings.draft_wait_ended(arrived, handled, ended.timing, is_prefill=is_prefill)
            return
        timings.step_ended(arrived, handled, ended.timing, is_prefill=is_prefill, num_drafts=ended.num_draft_tokens)
        timings.note_output(handled)
        self.loop.spec_stats.count_step(ended, self.place.draft_model)
        self.output_collector.put(ended.token_ids, ended.logprobs, self._progress(handled))

    def note_in_trace(self, action: Action, at: float | None = None) -> None:
        """Record an action of a traced session, of now or of ``at`` (s). Items are traced while steps are shown."""
        notes = self.trace.notes
        if notes is not None:
            notes.take(action, None if at is None else round(at / NANOSECONDS))
            if notes.is_full:
                self.loop.commands.trace_parent = ""

    def flush(self) -> None:
        """Wake the reader for new output, once the services have their next commands."""
        self.output_collector.release()

    def end(self, ending: Finish | Fail) -> None:
        """Deliver the last output, with the result or the error."""
        for timer in self._timers.values():
            timer.cancel()
        self.request_timings.note_end(self.loop.spec_stats.num_emitted_tokens)
        self.trace.ended(self.loop, ending)
        log_ending(self.loop, ending, self.request_timings.summary())
        self.output_collector.end(ending.error if isinstance(ending, Fail) else self._result(ending))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call after a delay, unless the request has ended by then."""
        key = object()
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self._fire, key, callback)

    def _fire(self, key: object, callback: Callable[[], None]) -> None:
        del self._timers[key]  # it holds the request, which is otherwise left to the garbage collector
        callback()

    def _progress(self, now: float) -> Progress | None:
        if not self.loop.engine_request.tells_progress or now < self._next_progress:
            return None
        self._next_progress = now + PROGRESS_INTERVAL_S
        return Progress(self.loop.spec_stats.summary(), self.request_timings.summary())

    def _result(self, finish: Finish) -> GenerationResult:
        loop, engine_request = self.loop, self.loop.engine_request
        return GenerationResult(
            text=loop.output.text,
            token_ids=loop.tokens.output,
            finish_reason=finish.reason,
            matched_stop=finish.matched_stop,
            logprobs=loop.output.logprobs,
            prompt_logprobs=loop.prompt_logprobs,
            usage=Usage(
                len(engine_request.prompt_token_ids), loop.tokens.num_output, loop.num_cached_prompt_tokens or 0
            ),
            speculation=loop.spec_stats.summary(),
            seed=engine_request.seed,
            request_id=engine_request.request_id,
            timing=self.request_timings.summary(),
            trace_id=self.trace.trace_id,
        )
