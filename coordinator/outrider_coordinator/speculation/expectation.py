"""Expectation: the tokens a second that speculation is expected to give the sessions of one target.

Owns how estimates of acceptance and time become rates, under what is believed and under what may be hoped. The choice
by these rates is ``mode_choice``'s.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from outrider_coordinator.speculation.draft_length import Choice, best_choice, usefulness
from outrider_coordinator.speculation.estimates.acceptance_estimate import HIGHEST, AcceptanceEstimate
from outrider_coordinator.speculation.estimates.round_timer import RoundTimer
from outrider_coordinator.speculation.estimates.session_spread import SessionSpread
from outrider_coordinator.speculation.estimates.step_times import StepTimes
from outrider_coordinator.speculation.session_state import ControlledSession

_IMBALANCE, _MAX_IMBALANCE = 0.016, 0.08
_HOPE_OF_ACCEPTANCE = 0.6
"""Probes are made where speculation would pay with so much of the rejections."""
_NUM_GROUPS = 2
"""Groups of sessions that take turns on two devices."""
_SAME_SECONDS = 0.03
"""Plain rounds whose durations differ by a smaller share leave what is expected of speculation as it is."""


def imbalance(num_sessions: int) -> float:
    """Share of the time by which the last of so many sessions ends later under speculation than the mean one: sessions
    gain unequally, and the last ones have forwards to themselves.
    """
    return min(_IMBALANCE * math.log2(max(num_sessions, 1)), _MAX_IMBALANCE)


class Expectation:
    """Expectation of speculation by some sessions, from the estimates of one moment."""

    def __init__(
        self,
        sessions: tuple[ControlledSession, ...],
        plain_seconds: float,
        share: float,
        useful: np.ndarray,  # [B, K]
        times: StepTimes,
        *,
        near: int,
    ) -> None:
        """``plain_seconds``: of a plain round; ``share`` and ``near`` are as ``best_choice`` has them."""
        self.sessions = sessions
        self.plain_seconds = plain_seconds
        self.share = share
        self.useful = useful
        self._times, self._near = times, near
        self.best = self._best(useful, share)

    def is_about(self, plain_seconds: float, share: float) -> bool:
        """Whether it holds with these too."""
        return _is_same(self.plain_seconds, plain_seconds) and _is_same(self.share, share)

    @cached_property
    def hoped_rate(self) -> float:
        """Tokens a second if more was accepted than expected."""
        hoped = (1.0 - (1.0 - self.useful) * _HOPE_OF_ACCEPTANCE) * (self.useful > 0.0)
        best = self._best(hoped, self.share)
        return 0.0 if best is None else best.rate

    @cached_property
    def rate_in_groups(self) -> float:
        """Tokens a second of two groups: in each round either device computes a forward for both."""
        share = self.share / _NUM_GROUPS
        best = self._best(self.useful, share)
        if best is None:
            return 0.0
        rows, drafted = share * len(self.sessions), share * sum(best.lengths)
        forward = self._times.longest_forward(rows, best.draft_length, drafted)
        return best.tokens / max(best.seconds, _NUM_GROUPS * forward)

    def _best(self, useful: np.ndarray, share: float) -> Choice | None:  # useful [B, K]
        return best_choice(useful, self._times, share, near=self._near)


class Expectations:
    """The expectation of one target's sessions, kept while decoding is plain and nothing is drafted."""

    def __init__(self, timer: RoundTimer, acceptance: AcceptanceEstimate) -> None:
        self._timer, self._acceptance = timer, acceptance
        self.spread = SessionSpread()
        self._known: Expectation | None = None
        """None where something was learned since that may change it."""

    def forget(self) -> None:
        """Something was learned of drafts."""
        self._known = None

    def of(self, sessions: tuple[ControlledSession, ...], plain_seconds: float, *, near: int) -> Expectation:
        """The expectation of these sessions now; arguments are as ``Expectation`` has them."""
        known, share = self._known, self._timer.share_of_all(len(sessions))
        if known is None or known.sessions != sessions or not known.is_about(plain_seconds, share):
            useful = self._usefulness(sessions)
            self._known = known = Expectation(sessions, plain_seconds, share, useful, self._timer.times, near=near)
        return known

    def _usefulness(self, sessions: tuple[ControlledSession, ...]) -> np.ndarray:  # -> [B, K]
        mean = self._acceptance.mean
        mean_tokens = self.spread.mean_tokens((session.acceptance for session in sessions), mean)
        for session in sessions:
            session.expected = min(mean * session.acceptance.relative(mean, mean_tokens), HIGHEST)
        acceptance = np.array([session.expected for session in sessions])
        limits = np.array([session.limit for session in sessions])
        by_position = self._acceptance.by_position()[: limits.max()]
        return usefulness(by_position, acceptance, limits, highest=HIGHEST)


def _is_same(seconds: float, others: float) -> bool:
    return abs(seconds - others) <= _SAME_SECONDS * others
