"""A rate limit for log lines that others can cause."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Lets one through every ``interval_s`` seconds and counts the rest. For one thread."""

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last: float | None = None
        self._num_suppressed = 0

    def take(self) -> int | None:
        """How many were held back since the last one, where this one may pass; else None."""
        now = self._clock()
        if self._last is not None and now - self._last < self._interval_s:
            self._num_suppressed += 1
            return None
        suppressed, self._num_suppressed, self._last = self._num_suppressed, 0, now
        return suppressed
