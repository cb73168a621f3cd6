"""Answered columns: what a batch of sessions makes of the answers to it, and the rows that this is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import ExtendColumns, ScoreColumns

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Places = Ints | slice
"""Of answers, or rows of a batch: all of them as a slice, of which arrays are views."""


@dataclass(slots=True)
class AnsweredProposals:
    """Proposals that were taken to the target as columns."""

    places: list[int]
    """Among the answers."""
    rows: list[int]
    """Of the batch."""
    commands: ScoreColumns


@dataclass(slots=True)
class AnsweredScores:
    """Scores that were judged, and what follows from them."""

    places: list[int]
    rows: list[int]
    num_accepted: list[int]
    next_token_ids: list[int]
    commands: ExtendColumns | ScoreColumns
    """To the drafts; or to the target, where both steps are plain."""


def ints(values: Sequence[Any]) -> Ints:
    """These numbers."""
    return np.array(values, dtype=np.int64)


def those(places: Places, values: NDArray[Any]) -> Ints:
    """The places as numbers; all of ``values`` where they are a slice."""
    return np.arange(len(values)) if isinstance(places, slice) else places


def listed(places: Places, values: Ints) -> list[int]:
    """The same as a list."""
    return list(range(len(values))) if isinstance(places, slice) else places.tolist()
