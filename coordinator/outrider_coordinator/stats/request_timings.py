"""Where the time of a request goes.

Owns its clock readings. Only intervals of one clock are ever subtracted from each other, so that nothing here depends
on two machines agreeing on the time.
"""

from __future__ import annotations

import time

from outrider.generation import Timing
from outrider.ports import ItemTiming
from outrider.readings import Histogram
from outrider_coordinator.stats.latency_histograms import LatencyHistograms

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
        self._draft = self._target = self._accept = self._wire = 0.0
        self._unbooked: list[tuple[Histogram, float]] = []

    now = staticmethod(time.perf_counter)
    """A reading of the clock."""

    def note_admitted(self) -> None:
        """The request runs, for the first time or again."""
        now = self.now()
        self._queued, self._queue_began = self._queue_time(now), None
        self._wait_began = now

    def note_parked(self) -> None:
        """The request waits again: for pages."""
        if self._queue_began is None:
            self._queue_began = self.now()

    def _queue_time(self, now: float) -> float:
        """Seconds of waiting for a turn or for pages, so far."""
        return self._queued + (0.0 if self._queue_began is None else now - self._queue_began)

    def note_output(self) -> None:
        """There is output; the first time counts."""
        now = self.now()
        if self._first_token is None:
            self._first_token = now
            self._latency_histograms.queue.observe(self._queue_time(now))
            self._latency_histograms.first_token.observe(now - self._arrived)
        else:
            self._unbooked.append((self._latency_histograms.between_tokens, now - self._last_token))
        self._last_token = now

    def note_end(self, num_tokens: int) -> None:
        """The request is over, with so many tokens out."""
        self.book()
        now = self.now()
        self._latency_histograms.whole.observe(now - self._arrived)
        if self._first_token is None:
            self._latency_histograms.queue.observe(self._queue_time(now))
        if self._first_token is not None and num_tokens > 1:
            self._latency_histograms.per_token.observe((self._last_token - self._first_token) / (num_tokens - 1))

    def note_judged(self, seconds: float) -> None:
        """The coordinator's own time for one verdict."""
        self._accept += seconds
        self._unbooked.append((self._latency_histograms.accept, seconds))

    def end_wait(self, began_next: float, ended: float, timing: ItemTiming | None, *, is_draft: bool) -> None:
        """A wait for a service ended, and the next one began. Without its times all of it was the service's."""
        waited = ended - self._wait_began
        # The draft's prefill is sent before anybody waits for it: then the wait is the shorter of the two.
        busy = waited if timing is None else min(waited, timing.total_ns * NANOSECONDS)
        if is_draft:
            self._draft += busy
        else:
            self._target += busy
        self._wire += waited - busy
        self._unbooked += (
            (self._latency_histograms.draft if is_draft else self._latency_histograms.score, busy),
            (self._latency_histograms.wire, waited - busy),
        )
        self._wait_began = began_next

    def book(self) -> None:
        """Count the times of steps noted since the last time beside those of other requests; they do not grow old."""
        unbooked, self._unbooked = self._unbooked, []
        for histogram, seconds in unbooked:
            histogram.observe(seconds)

    def summary(self) -> Timing:
        """What a user is told, at the end of the request."""
        now = self.now()
        return Timing(
            queue=self._queue_time(now),
            first_token=(self._first_token or now) - self._arrived,
            total=now - self._arrived,
            draft=self._draft,
            target=self._target,
            accept=self._accept,
            wire=self._wire,
        )
