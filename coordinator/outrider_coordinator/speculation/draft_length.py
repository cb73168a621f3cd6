"""The draft lengths that bring the most tokens a second: expected tokens over expected time. Pure functions.

With acceptance ``a_1, a_2, ...`` by position, a session's k-th draft token is of use with probability ``a_1 ... a_k``,
and a step brings one token more than that sum. The time of a round grows with the longest proposal, which all sessions
wait for, and with the drafted tokens of all. So for each longest length the best lengths are a threshold: a session
drafts a token as long as it is of use more often than its time brings tokens elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider_coordinator.speculation.estimates.step_times import RoundPrice

_LENGTHS_PAST_BEST = 2
"""Lengths that are looked at past the best: the rate falls there."""
_THRESHOLD_ROUNDS = 3
"""Rounds in which threshold and rate settle; they do so at once unless sessions differ much."""


class Times(Protocol):
    """``StepTimes``, as far as the choice asks."""

    def speculative(self, rows: float, draft_length: int) -> RoundPrice:
        """Seconds of a speculative round, by its drafted tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Draft lengths of some sessions, and what is expected of them."""

    lengths: tuple[int, ...]
    draft_length: int
    """The longest."""
    tokens: float
    """Expected of one round, of all sessions together."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


def usefulness(
    by_position: np.ndarray,  # [K]
    acceptance: np.ndarray,  # [B]
    limits: np.ndarray,  # [B]
    *,
    highest: float,
) -> np.ndarray:  # -> [B, K]
    """How often each draft token is accepted, 0 past a session's limit; not rising along a session's row.

    ``acceptance``: of each session. ``by_position``: a factor to that. ``limits``: most draft tokens of a session.
    """
    each = np.minimum(by_position[None, :] * acceptance[:, None], highest)
    useful = np.cumprod(each, axis=1)
    return np.asarray(useful * (np.arange(len(by_position))[None, :] < limits[:, None]))


def best_choice(
    useful: np.ndarray,  # [B, K]
    times: Times,
    share: float = 1.0,
    *,
    near: int = 1,
) -> Choice | None:
    """The best lengths that are not all 0; None where no session may draft.

    ``share``: of all sessions, those that share a forward: 1 unless they stand in groups. ``near``: a longest length
    from which better ones are looked for, up and down, until the rate falls twice.
    """
    longest = longest_of(useful)
    if not longest:
        return None
    start = min(max(near, 1), longest)
    best = choice_of(useful, start, times, share)
    best = _climb(best, range(start + 1, longest + 1), useful, times, share)
    if best.draft_length == start:
        best = _climb(best, range(start - 1, 0, -1), useful, times, share)
    return best


def _climb(best: Choice, lengths: range, useful: np.ndarray, times: Times, share: float) -> Choice:
    num_worse = 0
    for length in lengths:
        choice = choice_of(useful, length, times, share)
        if choice.rate > best.rate:
            best, num_worse = choice, 0
        else:
            num_worse += 1
            if num_worse == _LENGTHS_PAST_BEST:
                break
    return best


def longest_of(useful: np.ndarray) -> int:  # useful [B, K]
    """The longest length that any session may have."""
    return int((useful > 0.0).any(axis=0).sum())


def choice_of(useful: np.ndarray, draft_length: int, times: Times, share: float = 1.0) -> Choice:  # useful [B, K]
    """The best lengths up to ``draft_length``, which at least one session has."""
    useful = useful[:, :draft_length]
    rows = len(useful)
    price = times.speculative(share * rows, draft_length)
    best_row = int(useful[:, -1].argmax())
    drafts = useful > 0.0
    found = _expected(useful, drafts, price, share)
    for _ in range(_THRESHOLD_ROUNDS):
        drafted = share * sum(found.lengths)
        seconds_of_a_token = price.at(drafted) - price.at(max(drafted - share, 0.0))
        drafts = useful > max(seconds_of_a_token * found.rate, 0.0)
        drafts[best_row] = True  # without gain for any session: part of another choice
        better = _expected(useful, drafts, price, share)
        if better.rate <= found.rate:
            return found
        found = better
    return found


def relative_error(useful: np.ndarray, choice: Choice, error: float) -> float:  # useful [B, K]
    """Error of a choice's tokens, as a share of them, where the acceptance is uncertain by the share ``error`` of it.

    A token at position k is of use with the k-th power of the acceptance, so its error is k times that.
    """
    positions = np.arange(1, choice.draft_length + 1)
    drafts = positions[None, :] <= np.array(choice.lengths)[:, None]
    return error * float((positions * useful[:, : choice.draft_length] * drafts).sum()) / choice.tokens


def _expected(useful: np.ndarray, drafts: np.ndarray, price: RoundPrice, share: float) -> Choice:  # both [B, K]
    rows = len(useful)
    lengths = drafts.sum(axis=1).tolist()
    tokens = rows + float((useful * drafts).sum())
    return Choice(tuple(lengths), useful.shape[1], tokens, price.at(share * sum(lengths)))
