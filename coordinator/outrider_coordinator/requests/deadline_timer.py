"""Deadline timer for deadlines that change at every step and rarely expire.

The timer of the event loop keeps running and checks, when it fires, whether the deadline still applies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls back once, on the running event loop, unless it is cleared or set again before."""

    def __init__(self) -> None:
        self._ring: Callable[[], None] | None = None
        """None while it is not set."""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = 0.0
        """Due time of the event loop's timer, if there is one."""

    def set(self, delay_s: float, ring: Callable[[], None]) -> float:
        """Call ``ring`` after ``delay_s`` seconds, instead of the previous callback."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._due, self._ring = now + delay_s, ring
        if self._timer is not None and self._looks_at > self._due:
            self._stop()
        if self._timer is None:
            self._start(loop, delay_s)
        return now

    def clear(self) -> None:
        """Cancel the callback."""
        self._ring = None

    def cancel(self) -> None:
        """Cancel the callback and the timer of the event loop."""
        self.clear()
        self._stop()

    def _start(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        self._looks_at = loop.time() + delay_s
        self._timer = loop.call_later(delay_s, self._look)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._ring is None:
            return
        loop = asyncio.get_running_loop()
        left_s = self._due - loop.time()
        if left_s > 0:
            self._start(loop, left_s)
        else:
            ring, self._ring = self._ring, None
            ring()
