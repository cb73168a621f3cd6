"""Draft prefill: drafts compute the text that they lack before any session drafts.

When speculation begins, most drafts lack hundreds of tokens. A draft that proposes for one session computes the others'
text in small chunks beside that, and sessions that wait decode plainly between: each round then costs both and gains
little. So all sessions go on plainly until nearly all drafts have their text, which takes a few large chunks.
"""

from __future__ import annotations

from collections.abc import Collection

from outrider_coordinator.speculation.sessions import ControlledSession

LONGEST_INLINE_FEED = 16
"""Committed tokens that a draft may lack when it is asked for a proposal; what is longer is computed beforehand."""
_SHARE = 0.1
"""Share of the sessions whose drafts lack more, from which on the others wait."""
_LONGEST_S = 1.0
"""Longest wait for the remaining drafts, which may have no room, after the last one that has caught up."""


class DraftPrefill:
    """The sessions of one target whose drafts lack text, and whether all others wait for them."""

    def __init__(self) -> None:
        self.is_active = False
        self._last_s: float | None = None
        """Time at which it began, or a draft last caught up; None while no draft prefill is due."""
        self._num_behind = 0

    def update(self, now: float, sessions: Collection[ControlledSession], *, is_wanted: bool) -> None:
        """Begin or end a draft prefill of those sessions that are to draft; ``is_wanted``: drafts may compute text
        now.
        """
        self.is_active = False
        num_behind = _num_behind(sessions) if is_wanted else 0
        if num_behind <= _SHARE * len(sessions):
            self._last_s = None
        else:
            if self._last_s is None or num_behind < self._num_behind:
                self._last_s = now
            self._num_behind = num_behind
            self.is_active = now - self._last_s < _LONGEST_S


def _num_behind(sessions: Collection[ControlledSession]) -> int:
    """Sessions that may draft and whose drafts lack more than a step can bring."""
    return sum(session.num_uncomputed > LONGEST_INLINE_FEED and session.limit > 0 for session in sessions)
