"""Acceptance probes: while decoding is plain, a few sessions draft for two steps, to learn acceptance and nothing else.

Probes take at most 1% of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider_coordinator.speculation.comparison import SWITCH_ROUNDS
from outrider_coordinator.speculation.sessions import ControlledSession

_MAX_TIME_SHARE = 0.01
"""Share of the time that probes may take."""
_FIRST_PAUSE_S = 0.2
"""Seconds before the first probe after a change of the mode."""
_STEPS, _LENGTH = 2, 3
"""Steps of a session, and draft tokens in each."""
_MAX_SESSIONS = 4
"""Sessions that draft for one probe."""


class Probe:
    """The sessions that draft for a probe, and when the next one is due."""

    def __init__(self) -> None:
        self.sessions: dict[ControlledSession, int] = {}
        """Steps that are left of each."""
        self.num_probes = 0
        """Probes that were begun."""
        self._due_s = -math.inf

    def is_due(self, now: float) -> bool:
        """True if a probe may begin."""
        return not self.sessions and now >= self._due_s

    def begin(self, now: float, sessions: Sequence[ControlledSession], round_s: float, text_token_s: float) -> None:
        """Let the sessions draft whose drafts lack least text; none where few tokens are left of most."""
        num_tokens = (_STEPS + 1) * (_LENGTH + 1)
        lasting = [session for session in sessions if session.limit and session.num_left >= num_tokens]
        lasting.sort(key=lambda session: (session.num_uncomputed, session.num_probes))
        chosen = lasting[: min(_MAX_SESSIONS, (len(lasting) + 1) // 2)]
        if not chosen:
            return
        self.num_probes += 1
        self.sessions = dict.fromkeys(chosen, _STEPS)
        for session in chosen:
            session.num_probes += 1
            session.length = min(_LENGTH, session.limit)
        text_s = text_token_s * sum(session.num_uncomputed for session in chosen)
        self._due_s = now + (text_s + (_STEPS + SWITCH_ROUNDS) * round_s) / _MAX_TIME_SHARE

    def note_step(self, session: ControlledSession) -> None:
        """A session drafted."""
        if session in self.sessions:
            self.sessions[session] -= 1
            if not self.sessions[session]:
                self.leave(session)

    def leave(self, session: ControlledSession) -> None:
        """The session takes no part any more."""
        if self.sessions.pop(session, None) is not None:
            session.length = 0

    def end(self, now: float) -> None:
        """Decoding turns speculative, or has become plain: the next probe is a pause away."""
        self.sessions.clear()
        self._due_s = max(now + _FIRST_PAUSE_S, self._due_s)
