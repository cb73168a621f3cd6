"""Acceptance estimate: accepted draft tokens by position over all sessions, and each session relative to them.

Owns the counts and how they age. Counts are of judged tokens: those after a step's first rejection say nothing.
"""

from __future__ import annotations

import math

import numpy as np

PRIOR = 0.7
"""Acceptance before any token was judged."""
_PRIOR_TOKENS = 8.0
"""Judged tokens that the prior counts for."""
_POSITION_TOKENS = 32.0
"""Judged tokens that count for positions not differing."""
SESSION_TOKENS = 32.0
"""Judged tokens that the overall mean counts for in a session's own acceptance until it is known how much sessions
differ: by about 0.07, and fewer tokens of one say less than that.
"""
_SESSION_MEMORY = 128.0
_MEMORY, _MEMORY_ROUNDS = 256.0, 16.0
"""Judged tokens after which one counts for a third: a number, and more where a round brings many."""
_QUICK_MEMORY, _QUICK_ROUNDS = 32.0, 1.0
_QUICK_TOKENS = 10.0
_CHANGE_SIGMA, _CHANGE = 3.0, 0.15
"""The quick mean is so far from the slow one when the acceptance has changed, and the slow one starts anew."""
HIGHEST, LOWEST = 0.98, 0.005


class SessionAcceptance:
    """Acceptance of one session relative to that of all sessions at the time."""

    __slots__ = ("_accepted", "_expected", "num_judged", "surplus")

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0
        self.num_judged = 0
        """Judged tokens, all of them."""
        self.surplus = 0.0
        """Accepted tokens beyond what the overall acceptance of the time made expect."""

    def note(self, num_drafted: int, num_accepted: int, overall: float) -> None:
        """One verdict, and the acceptance over all sessions then."""
        judged = num_accepted + (num_accepted < num_drafted)
        keep = _SESSION_MEMORY / (_SESSION_MEMORY + judged)
        self._accepted = keep * self._accepted + num_accepted
        self._expected = keep * self._expected + judged * overall
        self.num_judged += judged
        self.surplus += num_accepted - judged * overall

    def relative(self, overall: float, mean_tokens: float = SESSION_TOKENS) -> float:
        """The session's acceptance over that of all, drawn to 1 as long as little is known of it: ``mean_tokens`` are
        the judged tokens that the mean counts for.
        """
        prior = mean_tokens * overall
        return (self._accepted + prior) / (self._expected + prior)


class AcceptanceEstimate:
    """Acceptance over all sessions, and how it differs by position in the proposal."""

    def __init__(self, max_length: int) -> None:
        self._accepted = self._judged = self._quick_accepted = self._quick_judged = 0.0
        self._accepted_at, self._expected_at = np.zeros(max_length), np.zeros(max_length)
        self._fresh: dict[tuple[int, int], tuple[int, float]] = {}
        """By drafted and accepted tokens: verdicts, and the sum of the acceptances expected of their sessions."""

    def note(self, num_drafted: int, num_accepted: int, expected: float) -> None:
        """One verdict of a session of which this acceptance is expected; counted with the next ``fold``."""
        count, total = self._fresh.get((num_drafted, num_accepted), (0, 0.0))
        self._fresh[num_drafted, num_accepted] = count + 1, total + expected

    def fold(self) -> None:
        """Count the verdicts of one message together."""
        if not self._fresh:
            return
        accepted_at, expected_at = np.zeros_like(self._accepted_at), np.zeros_like(self._expected_at)
        judged = 0
        for (num_drafted, num_accepted), (count, expected) in self._fresh.items():
            num_judged = num_accepted + (num_accepted < num_drafted)
            accepted_at[:num_accepted] += count
            expected_at[:num_judged] += expected
            judged += count * num_judged
        self._fresh.clear()
        self._age(judged)
        self._accepted_at += accepted_at
        self._expected_at += expected_at
        accepted = float(accepted_at.sum())
        self._accepted += accepted
        self._judged += judged
        self._quick_accepted += accepted
        self._quick_judged += judged
        self._look_for_change()

    def lighten(self) -> None:
        """From now on few tokens are judged: those judged before count for no more than such a few."""
        self._keep(min(1.0, _MEMORY / 2 / max(self._judged, 1.0)))
        quick = min(1.0, _QUICK_MEMORY / 4 / max(self._quick_judged, 1.0))
        self._quick_accepted *= quick
        self._quick_judged *= quick

    @property
    def mean(self) -> float:
        """Accepted of judged tokens, at all positions."""
        return (self._accepted + PRIOR * _PRIOR_TOKENS) / (self._judged + _PRIOR_TOKENS)

    @property
    def error(self) -> float:
        """Standard error of the mean, as far as it is known from the number of judged tokens."""
        mean = self.mean
        return math.sqrt(mean * (1.0 - mean) / (self._judged + _PRIOR_TOKENS))

    def by_position(self) -> np.ndarray:  # -> [max_length]
        """Acceptance of each position, when it is judged, over what its session is known for."""
        prior = _POSITION_TOKENS * self.mean
        return (self._accepted_at + prior) / (self._expected_at + prior)

    def _age(self, judged: int) -> None:
        keep = math.exp(-judged / (_MEMORY + _MEMORY_ROUNDS * judged))
        self._keep(keep)
        quick = math.exp(-judged / (_QUICK_MEMORY + _QUICK_ROUNDS * judged))
        self._quick_accepted *= quick
        self._quick_judged *= quick

    def _look_for_change(self) -> None:
        judged = self._quick_judged
        if judged < _QUICK_TOKENS:
            return
        slow, quick = self.mean, self._quick_accepted / judged
        sigma = math.sqrt(max(slow * (1.0 - slow), 0.04) / judged)
        if abs(quick - slow) > max(_CHANGE, _CHANGE_SIGMA * sigma):
            keep = min(1.0, judged / max(self._judged, 1.0))
            self._keep(keep)
            self._accepted = quick * self._judged

    def _keep(self, share: float) -> None:
        self._accepted *= share
        self._judged *= share
        self._accepted_at *= share
        self._expected_at *= share
