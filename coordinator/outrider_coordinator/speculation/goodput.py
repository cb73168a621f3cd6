"""Goodput: the draft lengths that give the most expected tokens per expected second. Pure functions.

With acceptance ``a_1, a_2, ...`` by position, a session's k-th draft token is accepted with probability
``a_1 ... a_k``.
A round takes longer with its longest proposal, which all sessions wait for, and with the draft tokens of all. So for
each longest length the best lengths are a threshold: a session drafts a token if it is accepted more often than its
time gives tokens elsewhere.

Shape letters: ``B`` sessions, ``K`` positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider_coordinator.speculation.acceptance import HIGHEST

RoundSeconds = Callable[[int], Callable[[float], float]]
"""Seconds of a round by its longest draft length, then by the mean of all."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Draft lengths of the sessions of a target, and what is expected of a round."""

    lengths: tuple[int, ...]  # [B]
    longest: int
    tokens: float
    """Of all sessions together."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


def usefulness(
    by_position: np.ndarray,  # [K]
    relative: np.ndarray,  # [B]
    limits: np.ndarray,  # [B]
) -> np.ndarray:  # -> [B, K]
    """Probability that each draft token is accepted; 0 past a session's limit.

    ``relative``: a session's acceptance over that of all. ``limits``: its largest draft length.
    """
    each = np.minimum(by_position[None, :] * relative[:, None], HIGHEST)
    useful = np.cumprod(each, axis=1)
    return np.asarray(useful * (np.arange(len(by_position))[None, :] < limits[:, None]))


def best_choice(useful: np.ndarray, seconds: RoundSeconds, near: int = 1) -> Choice | None:  # useful [B, K]
    """The lengths with the highest rate that are not all 0; None where no session may draft.

    ``near``: a longest length from which better ones are looked for in both directions, until one is not.
    """
    longest = int((useful > 0.0).any(axis=0).sum())
    if not longest:
        return None
    start = min(max(near, 1), longest)
    best = choice_of(useful, start, seconds(start))
    for lengths in (range(start + 1, longest + 1), range(start - 1, 0, -1)):
        for length in lengths:
            found = choice_of(useful, length, seconds(length))
            if found.rate <= best.rate:
                break
            best = found
    return best


def choice_of(useful: np.ndarray, longest: int, seconds: Callable[[float], float]) -> Choice:  # useful [B, K]
    """The best lengths up to ``longest``, which at least one session has."""
    useful = useful[:, :longest]
    best_row = int(useful[:, -1].argmax())
    found = _expected(useful, useful > 0.0, seconds)
    drafted = sum(found.lengths) / len(useful)
    token_s = (seconds(drafted) - seconds(max(drafted - 1.0, 0.0))) / len(useful)
    drafts = useful > max(token_s * found.rate, 0.0)
    drafts[best_row] = True
    fewer = _expected(useful, drafts, seconds)
    return fewer if fewer.rate > found.rate else found


def _expected(useful: np.ndarray, drafts: np.ndarray, seconds: Callable[[float], float]) -> Choice:  # both [B, K]
    rows = len(useful)
    lengths = drafts.sum(axis=1).tolist()
    tokens = rows + float((useful * drafts).sum())
    return Choice(tuple(lengths), useful.shape[1], tokens, seconds(sum(lengths) / rows))
