"""Rate limit of log lines, for services and transport alike: what runs a model imports no telemetry."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Rate limit for log lines that clients can cause: ``burst`` of them every ``interval_s`` seconds. Not
    thread-safe.
    """

    def __init__(self, interval_s: float, *, burst: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._burst = interval_s, burst
        self._clock = clock
        self._began: float | None = None
        """Time of the first logged line of this interval."""
        self._num_left = 0
        self._num_suppressed = 0

    def take(self) -> int | None:
        """Return the number of lines suppressed since the last one if this one may be logged, otherwise None."""
        now = self._clock()
        if self._began is None or now - self._began >= self._interval_s:
            self._began, self._num_left = now, self._burst
        if not self._num_left:
            self._num_suppressed += 1
            return None
        self._num_left -= 1
        suppressed, self._num_suppressed = self._num_suppressed, 0
        return suppressed
