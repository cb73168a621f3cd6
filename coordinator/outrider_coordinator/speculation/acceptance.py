"""Acceptance: accepted draft tokens by position over all sessions of a target, and of each session relative to them.

Counts are of judged tokens: those after a step's first rejection are not judged. Older tokens count less.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

PRIOR = 0.7
"""Acceptance before any token was judged."""
PRIOR_TOKENS = 8.0
"""Judged tokens that the prior counts for."""
_MEAN_TOKENS = 32.0
"""Judged tokens for which the mean counts at each position, and in each session's own acceptance."""
_MEMORY_TOKENS = 256.0
"""Judged tokens after which one counts for about a third."""
HIGHEST = 0.98
"""Largest acceptance that is expected of a token."""


class SessionAcceptance:
    """Acceptance of one session relative to that of all."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0

    def note(self, num_judged: int, num_accepted: int, overall: float) -> None:
        """Judged tokens of one step, and the acceptance over all sessions then."""
        keep = _MEMORY_TOKENS / (_MEMORY_TOKENS + num_judged)
        self._accepted = keep * self._accepted + num_accepted
        self._expected = keep * self._expected + num_judged * overall

    def relative(self, overall: float) -> float:
        """Acceptance over that of all sessions, shrunk towards 1."""
        prior = _MEAN_TOKENS * overall
        return (self._accepted + prior) / (self._expected + prior)


class Acceptance:
    """Acceptance over all sessions, by position in the proposal."""

    def __init__(self, max_length: int) -> None:
        self._accepted, self._judged = np.zeros(max_length), np.zeros(max_length)
        self._new: Counter[tuple[int, int]] = Counter()
        """Steps of the message under way, by drafted and accepted tokens."""
        self.mean = PRIOR
        """Accepted of judged tokens over all positions."""

    def note(self, num_drafted: int, num_accepted: int) -> int:
        """Take in one step with the next ``fold``; returns the number of judged tokens."""
        self._new[num_drafted, num_accepted] += 1
        return num_accepted + (num_accepted < num_drafted)

    def fold(self) -> None:
        """Count the steps of one message."""
        if not self._new:
            return
        accepted, judged = np.zeros_like(self._accepted), np.zeros_like(self._judged)
        for (num_drafted, num_accepted), count in self._new.items():
            accepted[:num_accepted] += count
            judged[: num_accepted + (num_accepted < num_drafted)] += count
        self._new.clear()
        keep = float(np.exp(-judged.sum() / _MEMORY_TOKENS))
        self._set(keep * self._accepted + accepted, keep * self._judged + judged)

    def lighten(self) -> None:
        """Halve the weight of what was judged: decoding becomes plain, and few tokens are judged from now on."""
        self._set(0.5 * self._accepted, 0.5 * self._judged)

    def _set(self, accepted: np.ndarray, judged: np.ndarray) -> None:  # [K] each
        self._accepted, self._judged = accepted, judged
        self.mean = float((accepted.sum() + PRIOR * PRIOR_TOKENS) / (judged.sum() + PRIOR_TOKENS))

    @property
    def num_judged(self) -> float:
        """Judged tokens, older ones discounted."""
        return float(self._judged.sum())

    @property
    def error(self) -> float:
        """Standard error of the mean, as a share of it."""
        mean = self.mean
        return float(np.sqrt((1.0 - mean) / mean / (self._judged.sum() + PRIOR_TOKENS)))

    def by_position(self) -> np.ndarray:  # -> [K]
        """Acceptance of each position, shrunk towards the mean."""
        prior = _MEAN_TOKENS * self.mean
        return np.asarray((self._accepted + prior) / (self._judged + _MEAN_TOKENS))
