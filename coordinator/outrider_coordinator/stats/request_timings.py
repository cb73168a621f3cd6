"""Times of a request by stage.

Owns its clock readings. Only intervals of one clock are ever subtracted from each other, so that nothing here depends
on two machines agreeing on the time.
"""

from __future__ import annotations

import time

from outrider.generation import StageTimes, Timing
from outrider.ports import ItemTiming
from outrider_coordinator.stats.latency_histograms import LatencyHistograms, StageHistograms

NANOSECONDS = 1e-9


class RequestTimings:
    """The times of one request, in seconds of this process's monotonic clock."""

    def __init__(self, latency_histograms: LatencyHistograms | None = None) -> None:
        """``latency_histograms`` counts these times beside those of other requests."""
        self._latency_histograms = latency_histograms or LatencyHistograms()
        self._arrived = self.now()
        self._queued = 0.0
        self._queue_began: float | None = self._arrived
        """None while the request runs."""
        self._first_token: float | None = None
        self._last_token = self._arrived
        self._wait_began = self._arrived
        self._paused = 0.0
        self._pause_began: float | None = None
        self._draft = self._target = self._accept = self._wire = 0.0
        self._prefill = StageTimes()
        self._grammar = self._mask = 0.0
        self._num_drafts_ahead = 0
        self._has_waited = False
        """True if the step that ends next has waited for its proposal."""

    now = staticmethod(time.perf_counter)
    """A reading of the clock."""

    def note_admitted(self) -> None:
        """The request runs, for the first time or again."""
        now = self.now()
        self._queued, self._queue_began = self._queue_time(now), None
        self._wait_began = now

    def note_grammar(self, within_ns: tuple[int, int] | None) -> None:
        """The grammar was compiled between these clock readings, before the request arrived; None: there is none."""
        if within_ns is not None:
            self._grammar = (within_ns[1] - within_ns[0]) * NANOSECONDS

    def note_parked(self) -> None:
        """The request waits again: for pages."""
        if self._queue_began is None:
            self._queue_began = self.now()

    def note_paused(self) -> None:
        """The reader is behind."""
        self._pause_began = self.now()

    def note_resumed(self) -> None:
        """The reader reads on: the waits for services and for output begin anew."""
        now = self.now()
        self._paused, self._pause_began = self._pause_time(now), None
        self._wait_began = self._last_token = now

    def note_released(self) -> None:
        """The request has no pages until its reader reads on, and waits for none."""
        self._queued, self._queue_began = self._queue_time(self.now()), None

    def _pause_time(self, now: float) -> float:
        """Seconds in which the reader was behind, so far."""
        return self._paused + (0.0 if self._pause_began is None else now - self._pause_began)

    def _queue_time(self, now: float) -> float:
        """Seconds of waiting for a turn or for pages, so far."""
        return self._queued + (0.0 if self._queue_began is None else now - self._queue_began)

    def note_output(self, now: float) -> None:
        """Time of output; the first one is the time to first token."""
        if self._first_token is None:
            self._first_token = now
            self._prefill = StageTimes(self._draft, self._target, self._accept, self._wire)
            self._latency_histograms.queue.observe(self._queue_time(now))
            self._latency_histograms.first_token.observe(now - self._arrived)
        else:
            self._latency_histograms.between_tokens.observe(now - self._last_token)
        self._last_token = now

    def note_end(self, num_tokens: int) -> None:
        """The request has ended; ``num_tokens`` were generated."""
        now = self.now()
        self._latency_histograms.whole.observe(now - self._arrived)
        if self._first_token is None:
            self._latency_histograms.queue.observe(self._queue_time(now))
        if self._first_token is not None and num_tokens > 1:
            busy = max(0.0, self._last_token - self._first_token - self._paused)
            self._latency_histograms.per_token.observe(busy / (num_tokens - 1))

    def draft_wait_ended(self, arrived: float, handled: float, timing: ItemTiming | None, *, is_prefill: bool) -> None:
        """The wait for a proposal ended when ``arrived`` was read; what followed from it was done by ``handled``."""
        stages = self._stages(is_prefill=is_prefill)
        busy, between = self._split_wait(arrived, handled, timing)
        self._note_draft(is_ahead=timing is not None and _is_ahead(timing))
        self._has_waited = True
        self._draft += busy
        stages["draft"].observe(busy)
        stages["wire"].observe(between)

    def step_ended(
        self, arrived: float, handled: float, timing: ItemTiming | None, *, is_prefill: bool, num_drafts: int = 0
    ) -> None:
        """The wait for scores ended when ``arrived`` was read; they were judged by ``handled``. Draft tokens that were
        not waited for had been pushed to the target.
        """
        self._note_draft(is_ahead=num_drafts > 0 and not self._has_waited)
        self._has_waited = False
        stages = self._stages(is_prefill=is_prefill)
        self._accept += handled - arrived
        stages["accept"].observe(handled - arrived)
        busy, between = self._split_wait(arrived, handled, timing)
        self._target += busy
        stages["score"].observe(busy)
        stages["wire"].observe(between)

    def _note_draft(self, *, is_ahead: bool) -> None:
        self._num_drafts_ahead += is_ahead
        self._latency_histograms.num_drafts_ahead += is_ahead

    def _stages(self, *, is_prefill: bool) -> StageHistograms:
        """Stages of the step's phase; every step up to the first output is prefill."""
        histograms = self._latency_histograms
        return histograms.prefill if is_prefill or self._first_token is None else histograms.decode

    def _split_wait(self, arrived: float, handled: float, timing: ItemTiming | None) -> tuple[float, float]:
        """The service's own part of a wait, and the rest; without its times all of it was the service's."""
        # What was under way when the reader fell behind counts until then: the rest is the pause.
        ended = arrived if self._pause_began is None else min(arrived, self._pause_began)
        waited = max(0.0, ended - self._wait_began)
        # The draft's prefill may be sent before a step waits for it; the wait is then the shorter of the two times.
        busy = waited if timing is None else min(waited, timing.total_ns * NANOSECONDS)
        self._mask += 0.0 if timing is None else timing.mask_ns * NANOSECONDS
        self._wire += waited - busy
        self._wait_began = handled
        return busy, waited - busy

    def summary(self) -> Timing:
        """Timing of the result, at the end of the request."""
        now = self.now()
        return Timing(
            queue=self._queue_time(now),
            first_token=(self._first_token or now) - self._arrived,
            total=now - self._arrived,
            draft=self._draft,
            target=self._target,
            accept=self._accept,
            wire=self._wire,
            paused=self._pause_time(now),
            prefill=self._prefill,
            grammar=self._grammar,
            mask=self._mask,
            num_drafts_ahead=self._num_drafts_ahead,
        )


def _is_ahead(timing: ItemTiming) -> bool:
    """True if an answer was begun before its command came: then none of its time is spent in the queue."""
    return not timing.queue_ns and timing.total_ns > 0
