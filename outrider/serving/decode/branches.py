"""Branches: the outcomes of a target's step for which a draft prepares proposals.

An outcome is a number of accepted draft tokens and the token that follows them. The likeliest is that all are accepted
and the draft's guess comes next, which the session's own sequence goes on with. Each other one is a branch: a row of
the same loop, over a sequence that borrows the pages of the text that both share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

LEAST_PROBABILITY = 0.004
"""Outcomes that are less likely get no row."""


class RunnersUp(Protocol):
    """Tokens that came next to each drawn token of a row, best first; -1 ends the list of one."""

    @property
    def token_ids(self) -> NDArray[np.int32]:  # [K, N]
        """The tokens."""
        ...

    @property
    def gaps(self) -> NDArray[np.float32]:  # [K, N]
        """Gap of each below the drawn token."""
        ...


class Drawn(NamedTuple):
    """Tokens that one row of a loop has drawn."""

    token_ids: list[int]
    runners_up: RunnersUp | None


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
    """The token that is to follow, and draft tokens after it."""
    runners_up: RunnersUp | None = None
    """Runners-up of the last ones of them; None: not known."""
    branch: Any = None
    """The sequence that holds it; None: the session's own."""

    @property
    def key(self) -> tuple[int, int]:
        """Length and token by which a verdict names it."""
        return self.length, self.token_ids[0]

    def choices(self, most: int) -> list[Choice]:
        """The likeliest other outcomes of the step that scores these draft tokens."""
        return heapq.nlargest(most, self._choices()) if most > 0 else []

    def _choices(self) -> Iterator[Choice]:
        count = len(self.token_ids) - 1
        if self.runners_up is None or not count:
            return
        reached = 1.0  # probability that all tokens so far are accepted
        ids, gaps = self.runners_up.token_ids[-count:].tolist(), self.runners_up.gaps[-count:].tolist()
        for length, (token_ids, below) in enumerate(zip(ids, gaps, strict=True), self.length + 1):
            weights = [math.exp(-gap) for token_id, gap in zip(token_ids, below, strict=True) if token_id >= 0]
            reached /= 1.0 + sum(weights)
            for token_id, weight in zip(token_ids, weights, strict=False):
                if reached * weight >= LEAST_PROBABILITY:
                    yield Choice(reached * weight, length, token_id)
