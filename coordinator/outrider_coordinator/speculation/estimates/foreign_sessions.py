"""Foreign sessions: those of other coordinators that share a target's forwards, as far as its reports show them.

A report tells the rows and tokens of the whole forward. What is not of own sessions is of foreign ones: how
many they are, and whether they draft. Nothing else is known of them, and nothing is sent to them.
"""

from __future__ import annotations

import statistics
from collections import deque

_NUM_FORWARDS = 5
"""Of so many the middle one counts: forwards after a session's end may hold two rows that nobody asked for."""
_LEAST = 0.5
"""Fewer of them than this share of the own sessions are none."""
_FEWER = {False: 0.2, True: 0.01}
"""Weight of a forward with fewer of them than thought, without drafts and with them: coordinators whose sessions
draft have some forwards to themselves.
"""
_NEWEST = 0.1
_MOST = 0.7
"""They draft if they have so many of the draft tokens that as many own sessions would have: where some of them do
and others do not, all are to turn plain, since only plain decoding by all is computed ahead.
"""
_ALONE = 0.92
"""What a mode's rate is worth while foreign sessions are in the other one: in mixed forwards nobody gains what was
expected, so that coordinators who expect about the same of both modes come to the same one.
"""


class ForeignSessions:
    """Foreign sessions of one target."""

    def __init__(self) -> None:
        self.num_sessions = 0.0
        """How many there are, about."""
        self.draft_length = 0.0
        """Of their proposals lately, 0 of steps without one."""
        self._drafting = 0.0
        """Share of late forwards in which they drafted."""
        self._latest: deque[int] = deque(maxlen=_NUM_FORWARDS)

    def note(self, rows: int, drafted: int, own_rows: int, own_drafted: int, *, usual_length: float) -> None:
        """A forward of so many rows and draft tokens, of which some are own; ``usual_length``: of own proposals."""
        self._latest.append(max(rows - own_rows, 0))
        found = statistics.median_low(self._latest)
        weight = 1.0 if found > self.num_sessions else _FEWER[own_drafted > 0]
        self.num_sessions += weight * (found - self.num_sessions)
        if self.num_sessions < _LEAST * own_rows:
            self.num_sessions = 0.0
        if rows > own_rows:
            self.draft_length += _NEWEST * ((drafted - own_drafted) / (rows - own_rows) - self.draft_length)
            length = own_drafted / own_rows if own_drafted else usual_length
            draft = drafted - own_drafted >= _MOST * length * (rows - own_rows)
            self._drafting += _NEWEST * (draft - self._drafting)

    def load_ratio(self, num_sessions: int) -> float:
        """All sessions over the own ones; 1 without foreign ones."""
        return 1.0 + self.num_sessions / max(num_sessions, 1)

    def longest(self, draft_length: int) -> int:
        """The longest proposal of a forward whose longest own one is ``draft_length``, at least: all wait for it."""
        return max(draft_length, round(self.draft_length)) if self.num_sessions else draft_length

    def worth(self, *, drafting: bool) -> float:
        """Factor to the expected rate of a mode: below 1 while most of them are in the other one."""
        if not self.num_sessions or (self._drafting > 0.5) is drafting:
            return 1.0
        return _ALONE
