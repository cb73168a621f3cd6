"""Heartbeats of a link, and detection of a silent peer.

A stopped process, or a network that drops all packets, leaves a connection open. Both ends of a link therefore send
heartbeats at regular intervals, and each closes the link if it receives nothing for its timeout. Everything here runs
on the event loop, beside the compute thread, so heartbeats continue during a long forward. Does not depend on messages
or streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from outrider.types import ModelDescription

HEARTBEAT_INTERVAL_S = 0.5
"""Interval of heartbeats: six in the default timeout of a link."""
DEFAULT_LINK_TIMEOUT_S = 3.0
"""Silence of a service after which a coordinator closes its link."""
DEFAULT_COORDINATOR_TIMEOUT_S = 15.0
"""Silence of a coordinator after which a service closes its link. Longer: sessions released too early are rebuilt."""
UNANNOUNCED_TIMEOUT_S = 60.0
"""Least timeout of a service for callers that announce no heartbeats. gRPC holds what has come of a message, up to the
largest there may be, and a link whose message never ends would hold it for good.
"""
MIN_INTERVALS = 3
"""Minimum timeout in intervals of the peer: one late heartbeat is no silence."""
LOOKS = 12
"""Number of checks of a watch within one timeout."""

CAPABILITY = ("outrider-heartbeats", "1")
"""Metadata of the call that opens a link: the caller sends heartbeats on it."""


def with_heartbeats(description: ModelDescription) -> ModelDescription:
    """The description of a service that sends heartbeats."""
    return replace(description, heartbeat_interval_ms=round(1000 * HEARTBEAT_INTERVAL_S))


def sends_heartbeats(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """True if a caller announces heartbeats in its call's metadata."""
    return CAPABILITY in (metadata or ())


class SilenceDetector:
    """Measures the silence of a peer by periodic checks of the clock.

    A late check counts for at most two periods: if the process was stopped or its event loop was blocked, the messages
    of that time have not been read yet.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        """``now`` is a reading of any monotonic clock, in seconds, as in all methods."""
        self.timeout_s = timeout_s
        self.period_s = timeout_s / LOOKS
        """Interval of the checks."""
        self._silent_s = 0.0
        self._looked_at = now

    def note_received(self, now: float) -> None:
        """Record a message, which ends the silence."""
        self._silent_s = 0.0
        self._looked_at = now

    def look(self, now: float) -> bool:
        """Count the time since the last check or message; return whether the timeout has passed."""
        self._silent_s += min(now - self._looked_at, 2 * self.period_s)
        self._looked_at = now
        return self._silent_s >= self.timeout_s


class SilenceWatch:
    """Calls ``on_silent`` once after the timeout. Belongs to the running event loop."""

    def __init__(self, timeout_s: float, on_silent: Callable[[float], None]) -> None:
        """Watch that runs after ``start`` only; ``on_silent`` is given the timeout."""
        self._detector = SilenceDetector(timeout_s, time.monotonic())
        self._on_silent = on_silent
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._is_stopped = False

    def start(self) -> None:
        """Start the checks; idempotent."""
        if self._timer is None and not self._is_stopped:
            self._detector.note_received(time.monotonic())
            self._schedule()

    def note_received(self) -> None:
        """Record a message of the peer."""
        self._detector.note_received(time.monotonic())

    def pause(self) -> None:
        """Stop counting until ``resume``, while nothing is read."""
        self._is_paused = True

    def resume(self) -> None:
        """Count again, from 0."""
        self._is_paused = False
        self.note_received()

    def stop(self) -> None:
        """Stop the checks; idempotent."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._detector.period_s, self._look)

    def _look(self) -> None:
        if self._is_paused:
            self.note_received()
        if self._detector.look(time.monotonic()):
            self.stop()
            self._on_silent(self._detector.timeout_s)
        else:
            self._schedule()
