"""Answered columns: what a batch of sessions makes of the answers to it, and the rows that this is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import U4, U8, AnswerColumns, Column, ExtendColumns, ScoreColumns

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
    is_direct: bool = False
    """Whether the target has them already, by a proposal channel."""


@dataclass(slots=True)
class AnsweredScores:
    """Scores that were judged, and what follows from them."""

    places: list[int]
    rows: list[int]
    num_accepted: Column  # [N]
    next_token_ids: Column  # [N]
    commands: ExtendColumns | ScoreColumns
    """To the drafts; or to the target, where both steps are plain."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What answers begin with, as bytes: where they are just those that a batch waits for, in its order, they are told
    by three comparisons.
    """

    generations: bytes  # [B] uint64
    base_lengths: bytes  # [B] uint32
    counts: bytes  # [B] uint32

    @classmethod
    def of(cls, generations: Ints, base_lengths: Ints, counts: Ints) -> Heads:
        """Of answers with these fields."""
        return cls(generations.astype(U8).tobytes(), base_lengths.astype(U4).tobytes(), counts.astype(U4).tobytes())

    @classmethod
    def of_one(cls, generation: int, base_length: int, count: int) -> Heads:
        """Of one answer."""
        return cls(generation.to_bytes(8, "little"), base_length.to_bytes(4, "little"), count.to_bytes(4, "little"))

    def are_of(self, answers: AnswerColumns[Any]) -> bool:
        """Whether the answers begin so. False for columns of other types, whatever they hold."""
        return (
            answers.generations.tobytes() == self.generations
            and answers.base_lengths.tobytes() == self.base_lengths
            and answers.counts.tobytes() == self.counts
        )


def ints(values: Sequence[Any]) -> Ints:
    """These numbers."""
    return np.array(values, dtype=np.int64)


def is_same(values: Column, others: Column) -> bool:
    """Whether two columns of one width hold the same numbers; False for other widths. Much faster than by values."""
    return values.tobytes() == others.tobytes()


def those(places: Places, values: NDArray[Any]) -> Ints:
    """The places as numbers; all of ``values`` where they are a slice."""
    return np.arange(len(values)) if isinstance(places, slice) else places


def listed(places: Places, values: Ints) -> list[int]:
    """The same as a list."""
    return list(range(len(values))) if isinstance(places, slice) else places.tolist()
