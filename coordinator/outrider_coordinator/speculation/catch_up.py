"""Catch-up: drafts are brought the text that they lack before any session drafts.

When speculation begins, most drafts lack hundreds of tokens. A draft that proposes for one session computes the others'
text in small chunks beside that, and sessions that wait decode plainly between: each round then costs both and gains
little. So all sessions go on plainly until nearly all drafts have their text, which takes a few large chunks.
"""

from __future__ import annotations

from collections.abc import Collection

from outrider_coordinator.speculation.session_state import ControlledSession

LONGEST_INLINE_FEED = 16
"""Committed tokens that a draft may lack when it is asked for a proposal; what is longer is brought beforehand."""
_BEGIN, _END = 0.25, 0.1
"""Shares of the sessions whose drafts lack more, for which a catch-up begins and ends."""
_LONGEST_S = 1.0
"""A draft that takes longer, or has no room, is not waited for."""


class CatchUp:
    """The sessions of one target whose drafts lack text, and whether all others wait for them."""

    def __init__(self) -> None:
        self.is_active = False
        self._began: float | None = None
        """None while no catch-up is due."""

    def update(self, now: float, sessions: Collection[ControlledSession], *, is_wanted: bool) -> None:
        """Begin or end a catch-up; ``is_wanted``: sessions are to draft."""
        share = _BEGIN if self._began is None else _END
        if not is_wanted or _num_lagging(sessions) <= share * len(sessions):
            self._began, self.is_active = None, False
            return
        if self._began is None:
            self._began = now
        self.is_active = now - self._began < _LONGEST_S


def _num_lagging(sessions: Collection[ControlledSession]) -> int:
    return sum(session.draft_lag > LONGEST_INLINE_FEED and session.limit > 0 for session in sessions)
