"""Foreign sessions: those of other coordinators that share a target's forwards, as far as its reports show them.

A report tells the rows and tokens of the whole forward. What is not of own sessions is of foreign ones: how
many they are, and whether they draft. Nothing else is known of them, and nothing is sent to them.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

_NUM_FORWARDS = 5
"""Of so many before the newest, of which more answers may come, the middle one counts: forwards after a session's end
may hold two rows that nobody asked for.
"""
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


@dataclass(slots=True)
class Forward:
    """A forward of a target, and what of it is known to be own."""

    rows: int
    drafted: int
    """Draft tokens."""
    own_rows: int
    own_drafted: int
    ended_ns: int = 0
    """By the target's clock; 0 where it does not say."""

    @property
    def num_foreign(self) -> int:
        """Rows of others."""
        return max(self.rows - self.own_rows, 0)

    def do_others_draft(self, usual_length: float) -> bool:
        """Whether the others draft; own sessions usually do with ``usual_length``."""
        length = self.own_drafted / self.own_rows if self.own_drafted else usual_length
        return self.drafted - self.own_drafted >= _MOST * length * self.num_foreign


class ForeignSessions:
    """Foreign sessions of one target."""

    def __init__(self) -> None:
        self.num_sessions = 0.0
        """How many there are, about."""
        self.draft_length = 0.0
        """Of their proposals lately, 0 of steps without one."""
        self._drafting = 0.0
        """Share of late forwards in which they drafted."""
        self._latest: deque[Forward] = deque(maxlen=_NUM_FORWARDS)
        self._passed_over_ns = 0
        """End of the last forward that says nothing."""

    def note(self, forward: Forward, *, usual_length: float) -> None:
        """A message of the target has come, with own rows of this forward; ``usual_length``: of own proposals. Where a
        forward's answers come in several messages, one of them may tell its rows and tokens alone.
        """
        if self._add_to_known(forward):
            return
        whole = tuple(self._latest)
        self._latest.append(forward)
        if not whole:
            return
        found = statistics.median_low([each.num_foreign for each in whole])
        weight = 1.0 if found > self.num_sessions else _FEWER[whole[-1].own_drafted > 0]
        self.num_sessions += weight * (found - self.num_sessions)
        if self.num_sessions < _LEAST * whole[-1].own_rows:
            self.num_sessions = 0.0
        self._note_drafts(whole[-1], usual_length)

    def pass_over(self, ended_ns: int) -> None:
        """A message has come with rows of a forward that computed prompts too, whose rows are nobody's yet."""
        self._passed_over_ns = ended_ns

    def _add_to_known(self, part: Forward) -> bool:
        """Whether it is of a forward that was told of. Own sessions are served by several messages a forward where
        their commands came in several: a row is no foreign one because its answer comes later.
        """
        if part.ended_ns == self._passed_over_ns != 0:
            return True
        known = next((known for known in self._latest if known.ended_ns == part.ended_ns != 0), None)
        if known is None:
            return False
        known.rows, known.drafted = max(known.rows, part.rows), max(known.drafted, part.drafted)
        known.own_rows += part.own_rows
        known.own_drafted += part.own_drafted
        return True

    def _note_drafts(self, forward: Forward, usual_length: float) -> None:
        if forward.num_foreign:
            drafted = forward.drafted - forward.own_drafted
            self.draft_length += _NEWEST * (drafted / forward.num_foreign - self.draft_length)
            self._drafting += _NEWEST * (forward.do_others_draft(usual_length) - self._drafting)

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
