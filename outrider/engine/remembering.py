"""What was worked out for a session when it was opened, found again with every step.

Owns how many sessions are remembered. Refuses to know what was worked out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.ports import Open

FoundT = TypeVar("FoundT")

MOST_REMEMBERED = 4096
"""Sessions. When there are more, all are worked out anew."""


class Remembering(Generic[FoundT]):
    """``work_out`` of each ``Open``, called once as long as it is remembered; for one thread."""

    def __init__(self, work_out: Callable[[Open], FoundT]) -> None:
        self._work_out = work_out
        # By the identity of the Open, which is kept here so that no other has the same: to compare two takes longer
        # than all that this saves.
        self._found: dict[int, tuple[Open, FoundT]] = {}

    def __call__(self, open_: Open) -> FoundT:
        """What was worked out for it."""
        found = self._found.get(id(open_))
        if found is None:
            if len(self._found) >= MOST_REMEMBERED:
                self._found.clear()
            found = self._found[id(open_)] = (open_, self._work_out(open_))
        return found[1]
