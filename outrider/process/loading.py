"""Watch over a service while its model loads, captures CUDA graphs and warms up.

Progress is bytes of weights and captured graphs, as the loader reports them. A device, driver or file system that hangs
stops them for good; then the process ends, to be started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from outrider.process.watchdog import LoopPing, Watchdog
from outrider.stalls import NO_STALL, Stall, StallClock
from outrider.transport.ending import Progress

LOADING_FACTOR = 30.0
"""Limit of loading, in multiples of ``hang_timeout_s``: a tensor may come over a slow network, and a first forward may
compile kernels.
"""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading; ``weights`` and ``captures`` are called with (done, total)."""

    weights: Progress
    """Progress in bytes."""
    captures: Progress
    """Progress in CUDA graphs."""
    on_files: Callable[[], None]
    """Called when the files of the model are on this host. A download before it has time limits of its own."""


class LoadingWatch:
    """Watchdog from the moment when the files are there until the service is ready."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """``timeout_s``: ``hang_timeout_s`` of the settings; 0: nothing is watched."""
        self._limit_s = LOADING_FACTOR * timeout_s
        self._clock, self._num_signs = StallClock(), 0
        ping = LoopPing(loop, self._limit_s)
        parts = {"loading": lambda: self.stall, "the event loop": ping.look}
        self._watchdog = Watchdog(parts, timeout_s=self._limit_s, grace_s=0.0)

    @property
    def stall(self) -> Stall:
        """Time since the last progress; thread-safe."""
        return Stall(self._clock.look(self._num_signs), self._limit_s) if self._num_signs else NO_STALL

    def start(self) -> None:
        """Start to watch."""
        self._watchdog.start()

    def stop(self) -> None:
        """Stop to watch; idempotent."""
        self._watchdog.stop()

    def note(self) -> None:
        """Record progress; thread-safe."""
        self._num_signs += 1

    def watched(self, progress: Progress) -> Progress:
        """Wrap a function so that each call counts as progress."""

        def watched(done: int, total: int) -> None:
            self.note()
            progress(done, total)

        return watched
