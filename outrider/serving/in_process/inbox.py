"""Inbox: entries from any thread for one thread, which waits for them with or without a limit.

``queue.SimpleQueue`` does the same, but its ``get`` with a timeout may wait for good: where the time is over before its
first look at the lock has been noted, it goes on with a negative timeout, which means none (CPython 3.11 and 3.12). An
engine that looks at its device every 20 us met that within seconds, and a single user's request then never ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

EntryT = TypeVar("EntryT")


class Inbox(Generic[EntryT]):
    """Entries in the order in which they were put. ``put`` is for any thread, what takes entries for one."""

    def __init__(self) -> None:
        self._entries: deque[EntryT] = deque()
        self._wake = threading.Lock()
        """Lock that is held but while ``put`` wakes the reader. Once too often makes ``wait`` return early, no more."""
        self._wake.acquire()
        self._is_waited_for = False

    def put(self, entry: EntryT) -> None:
        """Add an entry, and wake the reader."""
        self._entries.append(entry)
        if self._is_waited_for:
            self._is_waited_for = False
            with contextlib.suppress(RuntimeError):  # another thread has woken it at the same moment
                self._wake.release()

    @property
    def is_empty(self) -> bool:
        """True if there is no entry; for any thread."""
        return not self._entries

    def take_all(self) -> list[EntryT]:
        """All entries."""
        entries = self._entries
        return [entries.popleft() for _ in range(len(entries))]

    def wait(self, seconds: float | None) -> None:
        """Return when there is an entry, or when so much time is over, or before; None: without a limit."""
        self._is_waited_for = True
        if not self._entries:  # looked at last: what is put from now on wakes
            self._wake.acquire(timeout=-1 if seconds is None else max(0.0, seconds))
        self._is_waited_for = False
