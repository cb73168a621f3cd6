"""Verdict: the result of judging a proposal."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from outrider.values import step_value

BoolArray = NDArray[np.bool_]


class NextToken(enum.Enum):
    """Source of the token after the accepted ones."""

    RECOVERED = "recovered"
    """Drawn at the first rejection."""
    BONUS = "bonus"
    """Drawn after all K were kept, K = 0 included."""


@step_value(frozen=True, slots=True)
class Verdict:
    """Number of accepted draft tokens, and the token after them."""

    num_accepted: int
    next_token_id: int
    source: NextToken


def num_leading(kept: BoolArray) -> int:
    """How many entries are true before the first false one."""
    return kept.shape[0] if kept.all() else int(kept.argmin())
