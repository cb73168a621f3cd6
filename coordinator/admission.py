"""Who runs and who waits.

First in, first out: nobody overtakes, so that a long request is not starved by short ones. Knows no sessions and no
services; plain Python.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from outrider.errors import CapacityError

EntryT = TypeVar("EntryT")

RETRY_AFTER_MS = 1000


class Admission(Generic[EntryT]):
    """The entries that run, at most ``max_running``, and those that wait, at most ``max_queue``."""

    def __init__(self, *, max_running: int, max_queue: int) -> None:
        self._max_running = max_running
        self._max_queue = max_queue
        self._running: dict[EntryT, None] = {}
        self._waiting: deque[EntryT] = deque()
        self._is_blocked = False

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

    def submit(self, entry: EntryT) -> None:
        """Put an entry at the end of the queue; ``CapacityError`` when the queue is full."""
        is_free = not self._waiting and self._has_place()
        if not is_free and len(self._waiting) >= self._max_queue:
            raise CapacityError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait: no more can be taken",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._waiting.append(entry)

    def next(self) -> EntryT | None:
        """Take the next entry that may run now."""
        if not self._waiting or not self._has_place():
            return None
        entry = self._waiting.popleft()
        self._running[entry] = None
        return entry

    def put_back(self, entry: EntryT) -> None:
        """There was no room for it after all: back to the head of the queue, and nobody runs before ``unblock``."""
        del self._running[entry]
        self._waiting.appendleft(entry)
        self._is_blocked = True

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

    def _has_place(self) -> bool:
        return not self._is_blocked and len(self._running) < self._max_running
