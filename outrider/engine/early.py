"""What was computed and not asked for yet: the answers of each session, in the order in which it will ask for them.

Owns that order. Refuses to know what an answer says, and how much is computed ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView
from typing import Generic

from outrider.engine.ledger import SessionKey
from outrider.engine.pending import Pending
from outrider.engine.stage import EventT, ItemT, JobT, TextT


class Early(Generic[TextT, ItemT, JobT, EventT]):
    """Of all sessions; of most there is none."""

    def __init__(self) -> None:
        self._found: dict[SessionKey, deque[tuple[Pending[TextT, ItemT, JobT], EventT]]] = {}

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def keys(self) -> KeysView[SessionKey]:
        """Sessions that have any."""
        return self._found.keys()

    def count(self, key: SessionKey) -> int:
        """How many a session has."""
        return len(self._found.get(key, ()))

    def put(self, pending: Pending[TextT, ItemT, JobT], event: EventT) -> None:
        """One more, after those that the session has."""
        self._found.setdefault(pending.session.key, deque()).append((pending, event))

    def first(self, key: SessionKey) -> Pending[TextT, ItemT, JobT] | None:
        """What the session will ask for next, if that is here."""
        found = self._found.get(key)
        return found[0][0] if found else None

    def last(self, key: SessionKey) -> tuple[Pending[TextT, ItemT, JobT], EventT] | None:
        """The one after all others of the session."""
        found = self._found.get(key)
        return found[-1] if found else None

    def pop(self, key: SessionKey) -> tuple[Pending[TextT, ItemT, JobT], EventT]:
        """Take the first; ``KeyError`` where there is none."""
        found = self._found[key]
        taken = found.popleft()
        if not found:
            del self._found[key]
        return taken

    def drop(self, key: SessionKey) -> list[Pending[TextT, ItemT, JobT]]:
        """Forget a session's; returns for what they were computed."""
        return [pending for pending, _ in self._found.pop(key, ())]
