"""Goodput: the draft length that gives the most expected tokens per expected second. Pure functions.

With acceptance ``a_1, a_2, ...`` by position, the k-th draft token is accepted with probability ``a_1 ... a_k``. All
sessions of a target draft equally many tokens, each up to its own limit.

Shape letters: ``B`` sessions, ``K`` draft lengths from 1 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RoundSeconds = Callable[[np.ndarray], np.ndarray]
"""Seconds of a round with each draft length, [K], by the draft tokens of a session in the mean, [K]."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft length, and what is expected of a round."""

    length: int
    tokens: float
    """Tokens of all sessions together."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


def best_choice(by_position: np.ndarray, limits: Sequence[int], seconds: RoundSeconds) -> Choice | None:
    """The draft length with the highest rate, other than 0; None where no session may draft.

    ``by_position``: acceptance, [K]; ``limits``: the largest draft length of each session, [B].
    """
    longest = min(max(limits, default=0), len(by_position))
    if not longest:
        return None
    useful = np.cumprod(by_position[:longest])
    num_drafting = (np.array(limits)[:, None] > np.arange(longest)).sum(axis=0)  # at each position
    tokens = len(limits) + np.cumsum(useful * num_drafting)
    times = seconds(np.cumsum(num_drafting) / len(limits))
    best = int(np.argmax(tokens / times))
    return Choice(best + 1, float(tokens[best]), float(times[best]))
