"""Exploration budget: when an exploration of one kind may begin, from what those before it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SHARE = 0.01
"""Time that each kind of exploration may cost, as a share of all."""


@dataclass(slots=True)
class Excursion:
    """An exploration under way."""

    began: float
    num_tokens: int = 0
    """Tokens gained meanwhile by all sessions."""
    num_rounds: float = 0.0
    """Rounds of all sessions."""

    def note(self, num_tokens: int, share: float) -> None:
        """A message of this share of the sessions."""
        self.num_tokens += num_tokens
        self.num_rounds += share

    def price(self, now: float, rate: float) -> float:
        """Seconds lost, compared with the tokens a second that are usual."""
        expected = self.num_tokens / rate if rate > 0.0 else 0.0
        return max(now - self.began - expected, 0.0)


class ExplorationBudget:
    """When the next exploration of one kind may begin."""

    def __init__(self, *, shortest_pause_s: float, longest_pause_s: float, first_pause_s: float = math.inf) -> None:
        """``first_pause_s``: the longest pause after the first one; it doubles with each."""
        self._bounds = shortest_pause_s, longest_pause_s
        self._most_s = first_pause_s
        self._next_at: float | None = None
        self._paid_at = 0.0
        """When those so far are paid for."""

    def is_due(self, now: float, *, is_urgent: bool = False) -> bool:
        """Whether one may begin; ``is_urgent``: the first one need not wait."""
        if self._next_at is None:
            self._next_at = max(now if is_urgent else now + self._bounds[0], self._paid_at)
        return now >= self._next_at

    def spend(self, now: float, price_s: float) -> None:
        """One has ended and cost so many seconds."""
        shortest, longest = self._bounds
        self._next_at = self._paid_at = now + min(max(price_s / _SHARE, shortest), longest, self._most_s)
        self._most_s *= 2.0

    def allow(self, now: float) -> None:
        """The next one may begin at once."""
        self._next_at = now

    def reset(self) -> None:
        """Begin with the shortest pause, once those so far are paid for: loads that come and go are not to explore at
        each beginning.
        """
        self._next_at = None
