"""State of one admitted request: session, place, output, times and timers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from outrider.generation import Delta, GenerationResult, Progress, Usage
from outrider_coordinator.requests.deadline_timer import DeadlineTimer
from outrider_coordinator.requests.output_collector import OutputCollector
from outrider_coordinator.requests.request_log import log_ending
from outrider_coordinator.routing.placement import Place
from outrider_coordinator.session.actions import Action, DraftWaitEnded, Fail, Finish, StepEnded
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.stats.request_timings import RequestTimings
from outrider_coordinator.tracing import RequestTrace
from outrider_coordinator.tracing.requests import NOT_TRACED

PROGRESS_INTERVAL_S = 0.25
"""How often a resumable stream says how far it is: said with every delta, it was a tenth of the coordinator's work."""


class RequestState:
    """A request from admission to its end."""

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
        self.place = Place(
            loop.tokens, loop.engine_request.cache_salt, loop.engine_request.max_length, loop.speculation
        )
        self.request_timings = RequestTimings(latency_histograms)
        self.log_fields: dict[str, str] = {"request_id": loop.engine_request.request_id, **trace.log_fields}
        """Said in every line of the log about it."""
        self.num_pauses = 0
        """How often its reader was behind."""
        self.draft_wait_began: float | None = None
        """When it began to wait for a proposal that has not come; by the event loop's clock."""
        self._unbooked: list[tuple[StepEnded | DraftWaitEnded, float, float]] = []
        """What happened in its steps, when it was heard of and when the next command was made; not yet counted."""
        self.output_collector = OutputCollector(
            loop.output.take_text, num_tokens=len(loop.engine_request.emitted_token_ids)
        )
        self._next_progress = 0.0
        """When a resumable stream says again how far it is; by the clock of ``note``."""
        self._draft_timer = DeadlineTimer()
        self._timers: set[asyncio.TimerHandle] = set()
        """Those that have not rung."""

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return self.loop.is_over

    def deltas(self) -> AsyncIterator[Delta]:
        """Yield new output; the last delta has the result. Raises the error of the request."""
        return self.output_collector.deltas()

    def admit(self) -> None:
        """Record that the request runs."""
        self.book()
        self.request_timings.note_admitted()
        if self.trace.notes is not None:
            self.trace.notes.admitted()

    def park(self) -> None:
        """Record that the request waits for pages again."""
        self.book()
        self.request_timings.note_parked()

    def note(self, said: StepEnded | DraftWaitEnded, arrived: float, handled: float) -> None:
        """Take what a session says of its step; counted, and given to the user, with the next ``flush``.

        ``arrived``, ``handled``: when the service's answer was taken up, and when what follows from it was decided.
        """
        self._unbooked.append((said, arrived, handled))

    def note_in_trace(self, action: Action) -> None:
        """Record the actions of a traced session; items are traced while steps are shown."""
        notes = self.trace.notes
        if notes is not None:
            notes.take(action)
            if notes.is_full:
                self.loop.trace_items("")

    def book(self) -> None:
        """Count the steps since the last call and queue their output."""
        unbooked, self._unbooked = self._unbooked, []
        timings = self.request_timings
        for said, arrived, handled in unbooked:
            if isinstance(said, StepEnded):
                timings.step_ended(arrived, handled, said.timing)
                self._count(said)
                timings.note_output(handled)
                self.output_collector.put(said, self._progress(handled))
            else:
                timings.draft_wait_ended(arrived, handled, said.timing)

    def _count(self, step: StepEnded) -> None:
        self.loop.spec_stats.count_step(
            num_draft_tokens=step.num_draft_tokens,
            num_accepted=step.num_accepted,
            num_emitted=len(step.token_ids),
            why_not=step.no_draft_reason,
        )

    def flush(self) -> None:
        """Count new steps and wake the reader, once the services have their next commands."""
        self.book()
        self.output_collector.release()

    def end(self, ending: Finish | Fail) -> None:
        """Deliver the last output, with the result or the error."""
        self.book()
        self._cancel_timers()
        self.request_timings.note_end(self.loop.spec_stats.num_emitted_tokens)
        self.trace.ended(self.loop, ending)
        log_ending(self.loop, ending, self.request_timings.summary())
        self.output_collector.end(ending.error if isinstance(ending, Fail) else self._result(ending))

    def set_draft_timer(self, delay_s: float, ring: Callable[[], None]) -> None:
        """Replace the draft's timer."""
        self.draft_wait_began = self._draft_timer.set(delay_s, ring)

    def clear_draft_timer(self) -> None:
        """Stop the draft's timer."""
        self._draft_timer.clear()

    def call_later(self, delay_s: float, ring: Callable[[], None]) -> None:
        """Call after a delay, unless the request has ended by then."""

        def ring_once() -> None:
            self._timers.discard(timer)
            ring()

        timer = asyncio.get_running_loop().call_later(delay_s, ring_once)
        self._timers.add(timer)

    def _cancel_timers(self) -> None:
        self._draft_timer.cancel()
        for timer in self._timers:
            timer.cancel()

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
