"""Whose turn it is on a device that a draft and a target share.

Owns what is under way on each link, and when the commands that wait for one are sent: at the end of a turn of the event
loop, and on a shared device only when nothing is under way there. What both compute at once takes the time of both, and
sessions that fell out of step stay so by themselves; taking turns, all are drafted for and then all are scored. On
devices of their own a draft and a target serve different sessions meanwhile.

Prompts are outside of this: they are cut into chunks, and a chunk is served beside whatever else there is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from outrider.ports import Extend, Release, Score

LONGEST_WAIT_S = 0.1
"""What is under way for longer is waited for no more: it is no forward of running sessions, or nobody answers."""


class OfSession(Protocol):
    """Any command and any event."""

    @property
    def session(self) -> int:
        """The session's number on its link."""
        ...


class Lane:
    """One link's part in taking turns."""

    def __init__(self, turns: Turns, send_all: Callable[[], None]) -> None:
        self.device_id = ""
        """The same for all links to services on one device; empty: of no device that is shared."""
        self.is_waiting = False
        self.waiting_since = 0.0
        self.has_step = False
        """Whether a running session's step is among what waits."""
        self.under_way: dict[int, float] = {}
        """When each session's step was sent."""
        self.send_all = send_all
        self._turns = turns

    def put(self, command: OfSession) -> None:
        """One more waits; ``send_all`` is called when it is this link's turn."""
        if not self.is_waiting:
            self.is_waiting = True
            self.waiting_since = self._turns.now()
            self._turns.look_soon()
        self.has_step = self.has_step or _is_step(command)

    def sent(self, commands: Iterable[OfSession]) -> None:
        """All that waited was sent."""
        now = self._turns.now()
        self.is_waiting = self.has_step = False
        for command in commands:
            if _is_step(command):
                self.under_way[command.session] = now
            elif isinstance(command, Release) and command.session in self.under_way:
                del self.under_way[command.session]
                self._turns.look_soon()

    def heard(self, events: Iterable[OfSession]) -> None:
        """Their sessions were answered, whatever the answer."""
        for event in events:
            self.under_way.pop(event.session, None)
        self._turns.look_soon()

    def lost(self) -> None:
        """The link is gone."""
        self.is_waiting = self.has_step = False
        self.under_way.clear()
        self._turns.look_soon()


class Turns:
    """All links of one coordinator."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def lane(self, send_all: Callable[[], None]) -> Lane:
        """A new link."""
        self._lanes.append(lane := Lane(self, send_all))
        return lane

    def leave(self, lane: Lane) -> None:
        """A link that is used no more; idempotent."""
        lane.lost()
        if lane in self._lanes:
            self._lanes.remove(lane)

    def look_soon(self) -> None:
        """At the end of this turn of the event loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Whoever has waited longest goes first; what it sends may keep the others waiting."""
        self._is_due = False
        waiting = sorted((lane for lane in self._lanes if lane.is_waiting), key=lambda lane: lane.waiting_since)
        for lane in waiting:
            if not lane.has_step or not self._is_kept_waiting(lane):
                lane.send_all()
        if any(lane.is_waiting for lane in waiting):
            self._look_later()

    def _is_kept_waiting(self, lane: Lane) -> bool:
        sharing = [other for other in self._lanes if other.device_id and other.device_id == lane.device_id]
        oldest = self.now() - LONGEST_WAIT_S
        return len(sharing) > 1 and any(at > oldest for other in sharing for at in other.under_way.values())

    def _look_later(self) -> None:
        """In case that no answer comes, which would make us look."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LONGEST_WAIT_S, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.look_soon()


def _is_step(command: OfSession) -> bool:
    """Of a running session, unlike prompts, openings and ends."""
    if isinstance(command, Extend):
        return command.draft_length > 0
    return isinstance(command, Score) and command.base_length > 0
