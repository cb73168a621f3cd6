"""Watchdog: a thread that ends the process when a part of it hangs, so that its supervisor starts it again.

It looks at the stall of each part: the engine of a service, the event loop of any process. A hung part is reported with
the stacks of all threads, and the process ends with exit code 1 after a grace in which peers hear of it. A thread that
hangs with the interpreter lock stops the watchdog too; then faulthandler's own thread, which needs no lock, ends the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from outrider.stalls import Stall, StallClock
from outrider.telemetry import drain_output

_log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
"""Interval of the checks, short beside the timeouts of seconds that they look for."""
LOCKED_FACTOR = 6.0
"""Timeouts without the interpreter lock after which the process ends. More than one: a process that was stopped for
less goes on when it is continued.
"""
GRACE_S = 2.0
"""Time in which peers are notified of a hang by heartbeats and health, before the process ends."""
_REPORT_TIMEOUT_S = 1.0
"""Longest time of the report: a hung thread may hold what the report needs, such as the lock of the log."""
_STDERR = 2

Look = Callable[[], Stall]


class Watchdog:
    """Watches the parts of this process from ``start`` to ``stop``."""

    def __init__(
        self,
        parts: Mapping[str, Look],
        *,
        timeout_s: float,
        on_hang: Callable[[str], None] | None = None,
        grace_s: float = GRACE_S,
        end: Callable[[], None] | None = None,
    ) -> None:
        """``parts``: the stall of each part by its name in reports; asked by the watchdog's thread. ``timeout_s`` 0:
        nothing is watched. ``on_hang`` is called from that thread with the reason, ``grace_s`` before ``end``, which
        ends the process.
        """
        self._parts, self._timeout_s, self._on_hang, self._grace_s = parts, timeout_s, on_hang, grace_s
        self._end = end or _end_process
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        if self._timeout_s:
            self._thread.start()

    def stop(self) -> None:
        """Stop to watch; idempotent."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(LOOK_INTERVAL_S):
                faulthandler.dump_traceback_later(LOCKED_FACTOR * self._timeout_s, exit=True, file=_STDERR)
                for name, look in self._parts.items():
                    stall = look()
                    if stall.is_hang:
                        self._act(f"{name} has made no progress for {stall.age_s:.0f} s: the process ends")
                        return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _act(self, reason: str) -> None:
        reporting = threading.Thread(target=_report, args=(reason,), name="watchdog-report", daemon=True)
        reporting.start()
        try:
            if self._on_hang is not None:
                self._on_hang(reason)
            reporting.join(_REPORT_TIMEOUT_S)
            time.sleep(self._grace_s)
        finally:
            self._end()


class LoopPing:
    """Stall of an event loop: a callback that it has not called yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop, self._timeout_s = loop, timeout_s
        self._clock = StallClock()
        self._num_asked = self._num_answered = 0

    def look(self) -> Stall:
        """Age of the callback; asks again once it was called."""
        if self._num_asked == self._num_answered:
            self._num_asked += 1
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._answer)
        return Stall(self._clock.look(self._num_answered), self._timeout_s)

    def _answer(self) -> None:
        self._num_answered = self._num_asked


@contextlib.contextmanager
def loop_watched(timeout_s: float) -> Iterator[None]:
    """Watch the running event loop of a process that computes nothing else."""
    ping = LoopPing(asyncio.get_running_loop(), timeout_s)
    watchdog = Watchdog({"the event loop": ping.look}, timeout_s=timeout_s, grace_s=0.0)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def _report(reason: str) -> None:
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    _log.error(reason)
    drain_output()


def _end_process() -> NoReturn:
    os._exit(1)
