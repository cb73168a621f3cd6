"""Acceptance probes: while decoding is plain, a few sessions draft a few steps, so that their acceptance stays known.

A probe costs all sessions time, since a target computes nothing ahead while any session drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider_coordinator.speculation.exploration.budget import Excursion, ExplorationBudget
from outrider_coordinator.speculation.session_state import ControlledSession

_STEPS, _LENGTH, _MAX_SESSIONS = {False: 2, True: 4}, {False: 2, True: 4}, {False: 4, True: 8}
"""Steps, draft tokens of each, and sessions; more where a trial may follow from a single probe. All sessions wait for
the draft in each step, and in one more, whose proposals are asked for before the last verdicts are learned from.
"""
_MAX_FOLLOW_UPS = 6
"""Probes in a row while more is accepted than expected."""
_SURPRISE, _SURPRISE_SIGMA = 0.1, 1.5
"""More than expected is a share of the judged tokens, and so many standard errors of that."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 20.0
_FIRST_PAUSE_S = 4.0
"""Longest pause after the first probe by which something was to be learned of speculation by many sessions; it doubles.
"""
_LONGEST_S = 2.0
_ROUNDS_AFTER = 2
"""Plain rounds after a probe that are slower, since nothing was computed ahead."""


class AcceptanceProbe:
    """The probes of one target's sessions, one after the other."""

    def __init__(self) -> None:
        self.num_probes = 0
        self._budget = ExplorationBudget(shortest_pause_s=_SHORTEST_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S)
        self._budget_of_many = ExplorationBudget(
            shortest_pause_s=_SHORTEST_PAUSE_S,
            longest_pause_s=_LONGEST_PAUSE_S,
            first_pause_s=_FIRST_PAUSE_S,
        )
        """Of probes of many sessions of whose speculation nothing is known; they do not wait for others."""
        self._excursion: Excursion | None = None
        self.sessions: set[ControlledSession] = set()
        """Those that have not made their steps."""
        self._rounds_after = 0
        self._num_judged = self._num_accepted = self._num_follow_ups = 0
        self._expected = self._price_s = 0.0
        self._load_ratio = 1.0
        self._is_of_many = False

    @property
    def is_active(self) -> bool:
        """Whether a probe, or the time until the target computes ahead again, is under way."""
        return self._excursion is not None

    def begin_if_due(
        self,
        now: float,
        sessions: Sequence[ControlledSession],
        acceptance: float,
        *,
        load_ratio: float = 1.0,
        is_of_many: bool = False,
    ) -> None:
        """Let a few sessions draft, if it is time to; ``acceptance`` is what is expected of them. ``load_ratio``: all
        sessions of the target over these, which a probe costs time too, and which are probed by others. ``is_of_many``:
        nothing is known of speculation by many sessions.
        """
        if self._excursion is not None:
            if now - self._excursion.began > _LONGEST_S:
                self.cancel(now)
            return
        if not (self._budget_of_many if is_of_many else self._budget).is_due(now):
            return
        num_tokens = (_STEPS[is_of_many] + 1) * (_LENGTH[is_of_many] + 1)
        if not (chosen := _choose_sessions(sessions, _MAX_SESSIONS[is_of_many], num_tokens)):
            return
        self.num_probes += 1
        self._excursion, self.sessions = Excursion(now), set(chosen)
        self._num_judged = self._num_accepted = self._rounds_after = 0
        self._expected, self._load_ratio, self._is_of_many = acceptance, load_ratio, is_of_many
        for session in chosen:
            session.num_probes += 1
            session.probe_steps, session.length = _STEPS[is_of_many], min(_LENGTH[is_of_many], session.limit)

    def note_verdict(self, session: ControlledSession, num_drafted: int, num_accepted: int) -> None:
        """A step with draft tokens of any session."""
        if session in self.sessions:
            self._num_judged += num_accepted + (num_accepted < num_drafted)
            self._num_accepted += num_accepted
            session.probe_steps -= 1
            if not session.probe_steps:
                self.leave(session)

    def leave(self, session: ControlledSession) -> None:
        """The session takes no part any more."""
        if session in self.sessions:
            self.sessions.discard(session)
            session.probe_steps = session.length = 0

    def note_round(self, now: float, num_tokens: int, share: float, plain_rate: float) -> None:
        """A message of this share of the sessions; ``plain_rate``: tokens a second that are usual."""
        excursion = self._excursion
        if excursion is None or now <= excursion.began:
            return
        excursion.note(num_tokens, share)
        if self.sessions:
            return
        self._rounds_after += 1
        if self._rounds_after > _ROUNDS_AFTER:
            self._end(excursion, now, plain_rate)

    def cancel(self, now: float) -> None:
        """End the probe without a result."""
        for session in tuple(self.sessions):
            self.leave(session)
        if self._excursion is not None:
            self._spend(now, now - self._excursion.began)
        self._excursion = None

    def restart(self) -> None:
        """Decoding has become plain: the first probe comes after the shortest pause."""
        self._budget.reset()
        self._budget_of_many.reset()
        self._price_s, self._num_follow_ups = 0.0, 0

    def _end(self, excursion: Excursion, now: float, plain_rate: float) -> None:
        self._excursion = None
        self._price_s += self._load_ratio * excursion.price(now, plain_rate)
        self._num_follow_ups += 1
        if self._is_surprising and not self._is_of_many and self._num_follow_ups < _MAX_FOLLOW_UPS:
            self._budget.allow(now)
            return
        self._spend(now, self._price_s)
        self._price_s, self._num_follow_ups = 0.0, 0

    def _spend(self, now: float, price_s: float) -> None:
        self._budget.spend(now, price_s)
        if self._is_of_many:
            self._budget_of_many.spend(now, price_s)

    @property
    def _is_surprising(self) -> bool:
        """Whether more was accepted than expected, by more than chance."""
        judged, expected = self._num_judged, self._expected
        excess = self._num_accepted - expected * judged
        return excess > max(_SURPRISE * judged, _SURPRISE_SIGMA * math.sqrt(judged * expected * (1.0 - expected)))


def _choose_sessions(sessions: Sequence[ControlledSession], most: int, num_tokens: int) -> list[ControlledSession]:
    """Sessions whose drafts lack least text, since bringing text takes time, and one that was seldom chosen before.
    None unless most sessions have so many tokens to come, those of a probe: with fewer it is of no use to them.
    """
    able = [session for session in sessions if session.limit]
    lasting = [session for session in able if session.num_left >= num_tokens]
    if 2 * len(lasting) <= len(able):
        return []
    lasting.sort(key=lambda session: session.draft_lag)
    if len(lasting) < 2:
        return lasting
    count = min(most, (len(lasting) + 1) // 2)
    other = min(lasting[count - 1 :], key=lambda session: session.num_probes)
    return [*lasting[: count - 1], other]
