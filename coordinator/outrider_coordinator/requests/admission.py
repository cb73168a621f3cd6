"""Admission: running and waiting requests.

First in, first out among requests of one priority: none overtakes another, so that short requests do not starve long
ones; those of a lower number go first. Only requests that started together may change their order, if some of them find
no room. Running requests give way to none. Paused requests are neither running nor in the
queue. Plain Python, without sessions or services.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from typing import Generic, TypeVar

from outrider.errors import CapacityError

EntryT = TypeVar("EntryT")

RETRY_AFTER_MS = 1000
"""Hint to a refused client: a queue that is full drains within about a second."""


class Admission(Generic[EntryT]):
    """Bounds: at most ``max_running`` running entries, and a queue of at most ``max_queue`` waiting ones."""

    def __init__(self, *, max_running: int, max_queue: int) -> None:
        self.max_running = max_running
        """May change: entries beyond a lower limit continue, and none starts until fewer run."""
        self._max_queue = max_queue
        self.running: dict[EntryT, None] = {}
        self.waiting: deque[EntryT] = deque()
        """The next one first."""
        self.paused: dict[EntryT, None] = {}
        self._is_blocked = False
        self._arrivals: dict[EntryT, tuple[int, int]] = {}
        """Priority and number of each entry: its place in the queue."""
        self._arrival_numbers = itertools.count()
        self._is_short_of_capacity = False
        """An entry found no room, and the queue has not been empty since: entries are started one by one."""
        self._on_trial: EntryT | None = None
        """The entry that was started last, while it is not known whether it has room."""

    def submit(self, entry: EntryT, *, priority: int = 0) -> None:
        """Put an entry into the queue behind those of its priority; ``CapacityError`` if the queue is full."""
        is_free = not self.waiting and self._has_place()
        if not is_free and len(self.waiting) >= self._max_queue:
            raise CapacityError(
                f"{len(self.running)} requests run and {len(self.waiting)} wait: no more can be taken",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._arrivals[entry] = priority, next(self._arrival_numbers)
        self._enqueue(entry)

    def next(self) -> EntryT | None:
        """Return the next entry that may run now, if any."""
        if not self.waiting or not self._has_place():
            return None
        entry = self.waiting.popleft()
        self.running[entry] = None
        if self._is_short_of_capacity:
            self._on_trial = entry
        return entry

    def found_capacity(self, entry: EntryT) -> bool:
        """Record that an entry has room; return whether others waited for that."""
        if self._on_trial is not entry:
            return False
        self._end_trial()
        return True

    def put_back(self, entry: EntryT) -> None:
        """Return an entry without room to its place in the queue; none starts before ``unblock``."""
        del self.running[entry]
        self._enqueue(entry)
        self._is_blocked = self._is_short_of_capacity = True
        if self._on_trial is entry:
            self._on_trial = None

    def pause(self, entry: EntryT) -> None:
        """Take a running or waiting entry out, until ``resume``; others may have its place."""
        arrival = self._arrivals[entry]
        self.leave(entry)
        self._arrivals[entry] = arrival
        self.paused[entry] = None

    def resume(self, entry: EntryT) -> bool:
        """Return a paused entry to its place in the queue, which may hold more than ``max_queue`` then; return whether
        it was paused.
        """
        if entry not in self.paused:
            return False
        del self.paused[entry]
        self._enqueue(entry)
        return True

    def _enqueue(self, entry: EntryT) -> None:
        place = bisect.bisect(self.waiting, self._arrivals[entry], key=self._arrivals.__getitem__)
        self.waiting.insert(place, entry)
        self._is_blocked = self._is_blocked and place > 0  # a new head may have room where the last one had none

    def unblock(self) -> None:
        """Let entries start again, after room may have become free."""
        self._is_blocked = False

    def leave(self, entry: EntryT) -> None:
        """Remove an entry in any state and free what it held."""
        if entry in self.running:
            del self.running[entry]
            self._is_blocked = False
        elif entry in self.waiting:
            # The head may have been what there was no room for.
            self._is_blocked = self._is_blocked and self.waiting[0] is not entry
            self.waiting.remove(entry)
        self.paused.pop(entry, None)
        self._arrivals.pop(entry, None)
        if self._on_trial in (entry, None):
            self._end_trial()

    def _end_trial(self) -> None:
        self._on_trial = None
        self._is_short_of_capacity = self._is_short_of_capacity and bool(self.waiting)

    def _has_place(self) -> bool:
        return not self._is_blocked and self._on_trial is None and len(self.running) < self.max_running
