"""Stall: work that makes no progress, how long it has made none, and how long it may.

A hung device, driver or thread stops the computation of a process while its event loop goes on. Progress is therefore
measured on the work itself: by a mark that changes whenever a forward ends. Knows no engine, no link and no process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

DEFAULT_HANG_TIMEOUT_S = 10.0
"""Age of a forward from which it counts as hung, where no setting says otherwise."""
SUSPICIOUS_S = 2.0
"""Age of a stall from which new sessions are placed elsewhere."""
LONGEST_LOOK_S = 1.0
"""Time that one look counts at most: a process that was stopped itself has seen nothing of the time before."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Stall of one process at one moment."""

    age_s: float = 0.0
    """Age of the oldest forward in flight, or of the oldest runnable item where none is; 0: progress, or no work."""
    limit_s: float = 0.0
    """Age from which the process counts as hung; 0: never."""

    @property
    def is_hang(self) -> bool:
        """True if the process counts as hung."""
        return 0.0 < self.limit_s <= self.age_s

    @property
    def is_suspicious(self) -> bool:
        """True if a replica without a stall is the better place for a new session."""
        return self.age_s >= SUSPICIOUS_S


NO_STALL = Stall()


class StallClock:
    """Time since a mark last changed, counted by looks at it; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mark: Hashable | None = None
        self._looked_at = clock()
        self._age_s = 0.0

    def look(self, mark: Hashable | None) -> float:
        """Seconds for which looks have seen this mark; 0 for a new one, and for None, which stands for no work."""
        with self._lock:
            now = self._clock()
            is_same = mark is not None and mark == self._mark
            self._age_s = self._age_s + min(now - self._looked_at, LONGEST_LOOK_S) if is_same else 0.0
            self._mark, self._looked_at = mark, now
            return self._age_s
