"""What each session has asked for and what it will: not computed yet, or found before anybody asked.

Owns the order: of what is due, by who was served longest ago; of what was found, by who will ask first. Refuses to know
why something was foreseen, who computes it and what is told of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Generic

from outrider.serving.executor import EventT, ItemT, JobT, SequenceT
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.session_table import SessionKey


class RequestQueue(Generic[SequenceT, ItemT, JobT, EventT]):
    """Of all sessions. Each has at most one item that is due, and most have nothing found before it."""

    def __init__(self) -> None:
        self._due: dict[SessionKey, ScheduledRequest[SequenceT, ItemT, JobT, EventT]] = {}
        self._found: dict[SessionKey, deque[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]] = {}

    @property
    def due(self) -> Collection[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]:
        """What waits or is under way, in the order in which it was last served, longest ago first."""
        return self._due.values()

    def put(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> None:
        """It is due, behind all others."""
        self._due[pending.session.key] = pending

    def is_due(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> bool:
        """Whether it is still to be computed; False once it was given up."""
        return self._due.get(pending.session.key) is pending

    def due_of(self, key: SessionKey) -> ScheduledRequest[SequenceT, ItemT, JobT, EventT] | None:
        """What is to be computed for a session."""
        return self._due.get(key)

    def take(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> bool:
        """It is not due any more; False when it was not."""
        is_due = self.is_due(pending)
        if is_due:
            del self._due[pending.session.key]
        return is_due

    def keep_found(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> None:
        """It was found before it was asked for, and after all else that was found for its session."""
        self._found.setdefault(pending.session.key, deque()).append(pending)

    def take_found(self, key: SessionKey) -> None:
        """The first that was found for a session was asked for; ``KeyError`` where there is none."""
        found = self._found[key]
        found.popleft()
        if not found:
            del self._found[key]

    def last_found(self, key: SessionKey) -> ScheduledRequest[SequenceT, ItemT, JobT, EventT] | None:
        """What was found after all else for a session."""
        found = self._found.get(key)
        return found[-1] if found else None

    def first(self, key: SessionKey) -> ScheduledRequest[SequenceT, ItemT, JobT, EventT] | None:
        """What a session has asked for, or will ask for next."""
        found = self._found.get(key)
        return found[0] if found else self._due.get(key)

    def num_foreseen(self, key: SessionKey) -> int:
        """How much of a session's nobody has asked for."""
        due = self._due.get(key)
        return len(self._found.get(key, ())) + (due is not None and due.foreseen is not None)

    def drop(self, key: SessionKey) -> list[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]:
        """Forget all of a session's; returns what it was."""
        dropped = list(self._found.pop(key, ()))
        due = self._due.pop(key, None)
        return dropped if due is None else [*dropped, due]

    def keys_of(self, link_id: int) -> list[SessionKey]:
        """The sessions of a link that have anything."""
        return [key for key in dict.fromkeys((*self._due, *self._found)) if key[0] == link_id]
