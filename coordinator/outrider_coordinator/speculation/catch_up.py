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
_BEGIN, _END = 0.25, 0.02
"""Shares of the sessions whose drafts lack more, for which a catch-up begins, and lag, for which it ends."""
_LAG = 64
"""Tokens that such a draft lacks at least: one that has caught up comes to lack some more while others do."""
_LONGEST_S = 1.0
"""So long after the last draft that has caught up the others, which may have no room, are not waited for."""


class CatchUp:
    """The sessions of one target whose drafts lack text, and whether all others wait for them."""

    def __init__(self) -> None:
        self.is_active = False
        self._last_s: float | None = None
        """When it began, or a draft last caught up; None while no catch-up is due."""
        self._num_lagging = 0

    def update(self, now: float, sessions: Collection[ControlledSession], *, is_wanted: bool) -> None:
        """Begin or end a catch-up of those sessions that are to draft; ``is_wanted``: text may be brought now."""
        if not is_wanted or not self._is_due(sessions):
            self._last_s, self.is_active = None, False
            return
        num_lagging = _num_lacking(sessions, _LAG)
        if self._last_s is None or num_lagging < self._num_lagging:
            self._last_s = now
        self._num_lagging = num_lagging
        self.is_active = now - self._last_s < _LONGEST_S

    def _is_due(self, sessions: Collection[ControlledSession]) -> bool:
        share, least = (_BEGIN, LONGEST_INLINE_FEED) if self._last_s is None else (_END, _LAG)
        return _num_lacking(sessions, least) > share * len(sessions)


def _num_lacking(sessions: Collection[ControlledSession], num_tokens: int) -> int:
    """Sessions that may draft and whose drafts lack more than so many tokens."""
    return sum(session.draft_lag > num_tokens and session.limit > 0 for session in sessions)
