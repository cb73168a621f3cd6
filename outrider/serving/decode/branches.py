"""Branches: the outcomes of a target's step for which a draft prepares proposals.

An outcome is a number of accepted draft tokens and the token that follows them. The likeliest is that all are accepted
and the draft's guess comes next, which the session's own sequence goes on with. Each other one is a branch: a row of
the same loop, over a sequence that borrows the pages of the text that both share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LEAST_PROBABILITY = 0.004
"""Outcomes that are less likely get no row."""
RunnersUp = Sequence[tuple[int, float]]
"""Tokens that came next to a drawn one, best first, and how far each lies below it."""


class Drawn(NamedTuple):
    """Tokens that one row of a loop has drawn."""

    token_ids: list[int]
    runners_up: Sequence[RunnersUp]
    """Runners-up of each of them."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A row of a loop beside those of the sessions."""

    place: int
    """Place of its session in the step."""
    length: int
    """Tokens of the text before ``token_id``."""
    token_id: int
    sequence: Any
    """The executor's (``Executor.branch``)."""


class Choice(NamedTuple):
    """An outcome that may become a branch."""

    probability: float
    length: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome and the proposal for it."""

    length: int
    """Tokens of the text before ``token_ids``."""
    token_ids: list[int]
    """The token that is to follow, draft tokens, and the draft's guess of the token after these."""
    runners_up: Sequence[RunnersUp]
    """Runners-up of all of them but the first."""
    branch: Any = None
    """The sequence that holds it; None: the session's own."""

    @property
    def key(self) -> tuple[int, int]:
        """Length and token by which a verdict names it."""
        return self.length, self.token_ids[0]

    @property
    def pushed(self) -> list[int]:
        """Tokens that a target needs if the outcome comes true: that which is to follow, and the draft tokens."""
        return self.token_ids[:-1]

    def choices(self, most: int) -> list[Choice]:
        """The likeliest other outcomes of the step that scores these draft tokens."""
        return heapq.nlargest(most, self._choices()) if most > 0 else []

    def _choices(self) -> Iterator[Choice]:
        reached = 1.0  # probability that all tokens so far are accepted
        for length, runners_up in enumerate(self.runners_up, self.length + 1):
            weights = [math.exp(-gap) for _, gap in runners_up]
            reached /= 1.0 + sum(weights)
            for (token_id, _), weight in zip(runners_up, weights, strict=True):
                if reached * weight >= LEAST_PROBABILITY:
                    yield Choice(reached * weight, length, token_id)
