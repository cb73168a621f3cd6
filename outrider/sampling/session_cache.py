"""What was worked out for a session when it was opened, found again with every step.

Owns how many sessions are remembered. Refuses to know what was worked out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.ports import Open

FoundT = TypeVar("FoundT")

MOST_REMEMBERED = 4096
"""Sessions, of which some may have ended; when there are more, the first is forgotten."""
MOST_IDS = 256
"""Token ids that a session names at most to be remembered: ended ones take a few kilobytes each, and no more."""


class SessionCache(Generic[FoundT]):
    """``work_out`` of each ``Open``, called once as long as it is remembered; for one thread."""

    def __init__(self, work_out: Callable[[Open], FoundT]) -> None:
        self._work_out = work_out
        # By the identity of the Open, which is kept here so that no other has the same: to compare two takes longer
        # than all that this saves.
        self._found: dict[int, tuple[Open, FoundT]] = {}

    def __call__(self, open_: Open) -> FoundT:
        """What was worked out for it."""
        known = self._found.get(id(open_))
        if known is not None:
            return known[1]
        found = self._work_out(open_)
        if _num_ids(open_) <= MOST_IDS:
            if len(self._found) >= MOST_REMEMBERED:
                del self._found[next(iter(self._found))]
            self._found[id(open_)] = open_, found
        return found


def _num_ids(open_: Open) -> int:
    sampling = open_.sampling
    lists = (sampling.allowed_token_ids, sampling.logit_bias, open_.banned_token_ids, open_.eos_token_ids)
    return sum(map(len, (*lists, *sampling.bad_words)))
