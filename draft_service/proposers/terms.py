"""What drafting for a session keeps to, worked out once and found again with every item.

Owns what is remembered. Refuses to know what the terms say.
"""

from __future__ import annotations

from outrider.engine.drafting import DraftTerms, fits_loop
from outrider.ports import Open

_MOST_REMEMBERED = 4096
"""Sessions. When there are more, all are worked out anew."""


class KnownTerms:
    """The terms of the sessions of one model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # By the identity of what opened a session, which is kept here so that it stays the only one: to compare two
        # takes longer than all else here saves.
        self._known: dict[int, tuple[Open, DraftTerms | None]] = {}

    def of(self, open_: Open) -> DraftTerms | None:
        """The terms of a request; None: its tokens cannot be drawn in a loop."""
        known = self._known.get(id(open_))
        if known is None:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            terms = DraftTerms.of(open_, self._vocab_size) if fits_loop(open_) else None
            known = self._known[id(open_)] = (open_, terms)
        return known[1]
