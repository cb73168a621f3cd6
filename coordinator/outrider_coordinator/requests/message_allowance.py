"""Message allowance: how many messages to users may leave, fewer a second while the coordinator's thread is busy.

A message takes the thread longer than everything else a token does. Where both together would take all of its time,
steps would wait for it; then messages become fewer, and each has more tokens.

A thread that has to share its processor, or the interpreter, never seems busy: its messages do not become fewer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_AT_ONCE = 256
"""Messages that may leave in a row after a pause, whatever their rate."""
LEAST_PER_S = 2_500
"""Messages a second however busy the thread is: with 256 users one of each every .1 s."""
CHECK_INTERVAL_S = 0.1
"""Interval after which the thread's load is checked and the rate changed."""
BUSY, IDLE = 0.85, 0.75
"""Shares of the time that the thread computes: above the first the rate falls, below the second it rises."""
FALL, RISE = 0.8, 1.1
"""Factors of the rate."""


class MessageAllowance:
    """Messages that may leave now."""

    def __init__(
        self,
        max_per_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``max_per_s``: messages a second at most; 0: any number. ``clock`` is in seconds, and so is
        ``thread_clock``, the processor time of the thread that calls.
        """
        self._max_per_s, self._least_per_s = max_per_s, min(max_per_s, LEAST_PER_S)
        self._clock, self._thread_clock = clock, thread_clock
        self.per_s = float(max_per_s)
        """Messages a second as of now."""
        self._num_allowed, self._counted_at = float(MOST_AT_ONCE), clock()
        """Messages that may leave, as of then."""
        self._watched_since, self._thread_time = self._counted_at, thread_clock()
        """Time of the last check of the thread, and its processor time then."""

    @property
    def is_open(self) -> bool:
        """True if another message may leave."""
        return not self._max_per_s or self._num_allowed >= 1.0

    def take(self) -> None:
        """Count a message."""
        self._num_allowed -= 1.0

    def refill(self) -> None:
        """Allow the messages of the time that has passed."""
        now = self._clock()
        earned = (now - self._counted_at) * self.per_s
        self._num_allowed, self._counted_at = min(self._num_allowed + earned, float(MOST_AT_ONCE)), now
        if self._max_per_s and now - self._watched_since >= CHECK_INTERVAL_S:
            self._adapt(now)

    def _adapt(self, now: float) -> None:
        thread_time = self._thread_clock()
        busy = (thread_time - self._thread_time) / (now - self._watched_since)
        self._watched_since, self._thread_time = now, thread_time
        if busy > BUSY:
            self.per_s = max(self.per_s * FALL, float(self._least_per_s))
        elif busy < IDLE:
            self.per_s = min(self.per_s * RISE, float(self._max_per_s))
