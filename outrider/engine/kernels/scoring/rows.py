"""What is asked of each row and what is found: plain numpy columns, one entry a row.

Owns the names of the columns that travel to the device and back, and their packing into one buffer of 32-bit words.
Refuses to know kernels, sessions and acceptance rules.

Shape letters: ``R`` rows, ``M`` ids of all supports.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Words = NDArray[np.int32]

_COLDEST = 1e-7
"""Logits of 40 are then 6e8 bits, which float32 rounds to 64: as much as a power of two bears."""


class Wish(enum.IntFlag):
    """What a row wants beyond the likeliest token."""

    COUPLED = 1
    """The winner of the coupled race."""
    DRAWS = 2
    """A token drawn from the mass."""
    EXCLUDES = 4
    """Its support does not count in the mass and is not drawn."""
    ENTROPY = 8
    CUTS = 16
    """Only what min-p, top-k and top-p leave, in this order, can be drawn."""


class Column(enum.IntEnum):
    """The words that describe a row to the kernels."""

    INDEX = 0
    WISHES = 1
    LIMIT = 2
    SUPPORT_START = 3
    SUPPORT_STOP = 4
    KEY_LOW = 5
    KEY_HIGH = 6
    POSITION = 7
    BASE = 8
    SCALE = 9
    """Float32: what a logit is multiplied by to be in bits at the row's temperature."""
    MIN_P = 10
    """Float32."""
    TOP_K = 11
    """0: any number."""
    TOP_P_LOW = 12
    """Float64, in two words."""
    TOP_P_HIGH = 13


class Found(enum.IntEnum):
    """The words in which kernels answer."""

    UNFIT = 0
    """1 where a logit is not finite, 2 where the cuts need whoever sorts the row, 3 where both."""
    LARGEST = 1
    """Before it is divided by the temperature."""
    ARGMAX = 2
    RACED = 3
    MASS = 4
    OUTSIDE = 5
    ENTROPY = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows to look at."""

    indices: NDArray[np.int64]  # [R] the row of the logits
    wishes: NDArray[np.int64]  # [R] of Wish
    limits: NDArray[np.int64]  # [R] ids from here on are never drawn; at most V
    temperatures: NDArray[np.float64]  # [R] positive
    seeds: NDArray[np.uint64]  # [R]
    positions: NDArray[np.int64]  # [R]
    bases: NDArray[np.int64]  # [R]
    min_ps: NDArray[np.float64]  # [R] 0: no cut
    top_ks: NDArray[np.int64]  # [R] 0: no cut
    top_ps: NDArray[np.float64]  # [R] 1: no cut
    support_counts: NDArray[np.int64]  # [R]
    support_ids: NDArray[np.int64]  # [M]

    def __len__(self) -> int:
        return len(self.indices)

    def pack(self, words: Words) -> None:
        """Fill ``words``, as many as ``num_words`` says: row by row its columns, then the supports' ids."""
        count = len(self)
        columns = words[: len(Column) * count].reshape(count, len(Column)).T
        stops = np.cumsum(self.support_counts)
        columns[Column.INDEX] = self.indices
        columns[Column.WISHES] = self.wishes
        columns[Column.LIMIT] = self.limits
        columns[Column.SUPPORT_START] = stops - self.support_counts
        columns[Column.SUPPORT_STOP] = stops
        columns[Column.KEY_LOW : Column.KEY_HIGH + 1] = self.seeds.view(np.int32).reshape(count, 2).T
        columns[Column.POSITION] = self.positions
        columns[Column.BASE] = self.bases
        columns[Column.SCALE] = (
            (math.log2(math.e) / np.maximum(self.temperatures, _COLDEST)).astype(np.float32).view(np.int32)
        )
        columns[Column.MIN_P] = self.min_ps.astype(np.float32).view(np.int32)
        columns[Column.TOP_K] = self.top_ks
        columns[Column.TOP_P_LOW :] = self.top_ps.view(np.int32).reshape(count, 2).T
        words[len(Column) * count : self.num_words] = self.support_ids

    @property
    def num_words(self) -> int:
        """How many words ``pack`` fills."""
        return len(Column) * len(self) + len(self.support_ids)

    @property
    def num_found(self) -> int:
        """How many words the answer has."""
        return len(Found) * len(self) + len(self.support_ids)

    def any(self, wish: Wish) -> bool:
        """Whether any row has this wish."""
        return bool((self.wishes & wish).any())

    def all(self, wish: Wish) -> bool:
        """Whether every row has this wish."""
        return bool((self.wishes & wish).all())


def every_kind() -> Iterator[Rows]:
    """A row for each combination of wishes for which there are kernels of their own."""
    for coupled, outside, cuts in itertools.product((0, Wish.COUPLED), (0, Wish.EXCLUDES), (0, Wish.CUTS)):
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1)
        yield Rows(
            indices=zero, wishes=zero + int(Wish.DRAWS | Wish.ENTROPY | coupled | outside | cuts), limits=zero + 1,
            temperatures=one, seeds=zero.astype(np.uint64), positions=zero, bases=zero, min_ps=0 * one, top_ks=zero,
            top_ps=one / 2, support_counts=zero, support_ids=zero[:0],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found of R rows."""

    words: Words = field(repr=False)  # [7 * R + M]
    num_rows: int

    def of(self, found: Found) -> NDArray[Any]:
        """One column [R]: float32 for LARGEST, MASS and ENTROPY, int32 for the others."""
        column = self.words[found * self.num_rows : (found + 1) * self.num_rows]
        return column.view(np.float32) if found in {Found.LARGEST, Found.MASS, Found.ENTROPY} else column

    @property
    def support_probs(self) -> NDArray[np.float32]:
        """[M]."""
        return self.words[len(Found) * self.num_rows :].view(np.float32)


class Launch(Protocol):
    """Work under way."""

    @property
    def on_device(self) -> torch.Tensor:
        """What will be found, where it is found."""
        ...

    def findings(self) -> Findings:
        """Wait for it."""
        ...
