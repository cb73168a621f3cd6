"""Who runs and who waits.

First in, first out: nobody overtakes, so that a long request is not starved by short ones. Only those that were started
together, before anyone was known to find no room, may do so in another order. Knows no sessions and no services; plain
Python.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Generic, TypeVar

from outrider.errors import CapacityError

EntryT = TypeVar("EntryT")

RETRY_AFTER_MS = 1000


class Admission(Generic[EntryT]):
    """Running entries, at most ``max_running`` of them, and a queue of at most ``max_queue`` waiting ones."""

    def __init__(self, *, max_running: int, max_queue: int) -> None:
        self._max_running = max_running
        self._max_queue = max_queue
        self._running: dict[EntryT, None] = {}
        self._waiting: deque[EntryT] = deque()
        self._is_blocked = False
        self._arrivals: dict[EntryT, int] = {}
        self._arrival_numbers = itertools.count()
        self._is_short_of_room = False
        """Somebody found no room, and the queue has not been empty since: they are started one by one."""
        self._on_trial: EntryT | None = None
        """Started, and not yet known to have found room."""

    @property
    def running(self) -> tuple[EntryT, ...]:
        """The entries that run."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[EntryT, ...]:
        """The entries that wait, the next one first."""
        return tuple(self._waiting)

    @property
    def num_running(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def set_max_running(self, max_running: int) -> None:
        """Change the limit. Entries that run beyond a lower one go on; none starts until there are fewer."""
        self._max_running = max_running

    def submit(self, entry: EntryT) -> None:
        """Put an entry at the end of the queue; ``CapacityError`` when the queue is full."""
        is_free = not self._waiting and self._has_place()
        if not is_free and len(self._waiting) >= self._max_queue:
            raise CapacityError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait: no more can be taken",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._arrivals[entry] = next(self._arrival_numbers)
        self._waiting.append(entry)

    def next(self) -> EntryT | None:
        """Take the next entry that may run now."""
        if not self._waiting or not self._has_place():
            return None
        entry = self._waiting.popleft()
        self._running[entry] = None
        if self._is_short_of_room:
            self._on_trial = entry
        return entry

    def found_room(self, entry: EntryT) -> bool:
        """Note that an entry runs for good; whether others waited for that."""
        if self._on_trial is not entry:
            return False
        self._end_trial()
        return True

    def put_back(self, entry: EntryT) -> None:
        """There was no room for it after all: back to its place in the queue, and nobody runs before ``unblock``."""
        del self._running[entry]
        place = sum(self._arrivals[other] < self._arrivals[entry] for other in self._waiting)
        self._waiting.insert(place, entry)
        self._is_blocked = self._is_short_of_room = True
        if self._on_trial is entry:
            self._on_trial = None

    def unblock(self) -> None:
        """There may be room again."""
        self._is_blocked = False

    def leave(self, entry: EntryT) -> None:
        """An entry is over, wherever it stood; what it held is free."""
        if entry in self._running:
            del self._running[entry]
            self._is_blocked = False
        elif entry in self._waiting:
            # The head may have been what there was no room for.
            self._is_blocked = self._is_blocked and self._waiting[0] is not entry
            self._waiting.remove(entry)
        self._arrivals.pop(entry, None)
        if self._on_trial in (entry, None):
            self._end_trial()

    def _end_trial(self) -> None:
        self._on_trial = None
        self._is_short_of_room = self._is_short_of_room and bool(self._waiting)

    def _has_place(self) -> bool:
        return not self._is_blocked and self._on_trial is None and len(self._running) < self._max_running
