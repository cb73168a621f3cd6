"""Acceptance: accepted draft tokens by position, over all sessions of a target.

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
"""Judged tokens for which the mean counts at each position."""
_MEMORY_TOKENS = 256.0
"""Judged tokens after which one counts for about a third."""


class Acceptance:
    """Acceptance over all sessions, by position in the proposal."""

    def __init__(self, max_length: int) -> None:
        self._accepted, self._judged = np.zeros(max_length), np.zeros(max_length)
        self._new: Counter[tuple[int, int]] = Counter()
        """Steps of the message under way, by drafted and accepted tokens."""
        self.mean = PRIOR
        """Accepted of judged tokens over all positions."""

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one step with the next ``fold``."""
        self._new[num_drafted, num_accepted] += 1

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
        self._accepted, self._judged = keep * self._accepted + accepted, keep * self._judged + judged
        self.mean = float((self._accepted.sum() + PRIOR * PRIOR_TOKENS) / (self._judged.sum() + PRIOR_TOKENS))

    @property
    def num_judged(self) -> float:
        """Judged tokens, older ones discounted."""
        return float(self._judged.sum())

    def by_position(self) -> np.ndarray:  # -> [K]
        """Acceptance of each position, shrunk towards the mean."""
        prior = _MEAN_TOKENS * self.mean
        return np.asarray((self._accepted + prior) / (self._judged + _MEAN_TOKENS))
