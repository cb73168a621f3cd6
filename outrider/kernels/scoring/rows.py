"""Requests and results of each row: plain numpy columns, one entry a row.

Owns the names of the columns that travel to the device and back, and their packing into one buffer of 32-bit words.
Refuses to know kernels, sessions and acceptance rules.

Shape letters: ``R`` rows, ``M`` ids of all supports.
"""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Words = NDArray[np.int32]

NO_IDS: Words = np.empty(0, dtype=np.int32)
_LARGEST = 2**31 - 1
_COLDEST = 1e-7
"""Logits of 40 are then 6e8 bits, which float32 rounds to 64: as much as a power of two bears."""


class RowFlags(enum.IntFlag):
    """Results of a row besides the likeliest token."""

    COUPLED = 1
    """The Gumbel argmax of stream ``COUPLED``."""
    DRAWS = 2
    """A token drawn from the mass."""
    EXCLUDES = 4
    """Row whose support does not count in the mass and is not drawn."""
    ENTROPY = 8
    CUTS = 16
    """Row of which only what min-p, top-k and top-p leave, in this order, can be drawn."""


class ScoringColumn(enum.IntEnum):
    """The words that describe a row to the kernels: first those that place it, then those that say what it asks."""

    INDEX = 0
    POSITION = 1
    BASE = 2
    SUPPORT_START = 3
    SUPPORT_STOP = 4
    LIMIT = 5
    FLAGS = 6
    KEY_LOW = 7
    KEY_HIGH = 8
    SCALE = 9
    """Float32: what a logit is multiplied by to be in bits at the row's temperature."""
    MIN_P = 10
    """Float32."""
    TOP_K = 11
    """0: any number."""
    TOP_P_LOW = 12
    """Float64, in two words."""
    TOP_P_HIGH = 13


place = struct.Struct("=6i").pack
"""A row's first words, in their order."""
_ASK = struct.Struct("=iQffid")


class Found(enum.IntEnum):
    """The words in which kernels answer."""

    STATUS = 0
    """1 where a logit is not finite, 2 where the cuts need the row sorted, 3 where both."""
    LARGEST = 1
    """Largest logit before it is divided by the temperature."""
    ARGMAX = 2
    GUMBEL_ARGMAX = 3
    MASS = 4
    OUTSIDE = 5
    ENTROPY = 6


def ask(
    flags: RowFlags,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> bytes:
    """A row's other words; ``temperature`` is positive."""
    scale = np.float32(math.log2(math.e) / max(temperature, _COLDEST))
    return _ASK.pack(flags, seed, scale, np.float32(min_p), min(top_k, _LARGEST), top_p)


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows to look at."""

    words: Words  # [R, columns]
    support_ids: Words  # [M] one row's after the other's

    @classmethod
    def of(cls, parts: Iterable[bytes], support_ids: Words) -> Rows:
        """Row by row what ``place`` and ``ask`` give."""
        return cls(np.frombuffer(b"".join(parts), dtype=np.int32).reshape(-1, len(ScoringColumn)), support_ids)

    def __len__(self) -> int:
        return len(self.words)

    def pack(self, words: Words) -> None:
        """Fill ``words``, as many as ``num_words`` says: row by row its columns, then the supports' ids."""
        np.concatenate((self.words.ravel(), self.support_ids), out=words)

    @property
    def num_words(self) -> int:
        """Number of words that ``pack`` fills."""
        return self.words.size + len(self.support_ids)

    @property
    def num_found(self) -> int:
        """Number of words of the answer."""
        return len(Found) * len(self) + len(self.support_ids)

    def any(self) -> RowFlags:
        """Flags of any row."""
        return RowFlags(int(np.bitwise_or.reduce(self.words[:, ScoringColumn.FLAGS])))

    def all(self) -> RowFlags:
        """Flags of every row."""
        return RowFlags(int(np.bitwise_and.reduce(self.words[:, ScoringColumn.FLAGS])))


def every_kind() -> Iterator[Rows]:
    """A row for each combination of flags for which there are kernels of their own."""
    for coupled, outside, cuts in itertools.product((0, RowFlags.COUPLED), (0, RowFlags.EXCLUDES), (0, RowFlags.CUTS)):
        asked = ask(RowFlags.DRAWS | RowFlags.ENTROPY | coupled | outside | cuts, top_p=0.5)
        yield Rows.of((place(0, 0, 0, 0, 0, 1), asked), NO_IDS)


_REAL = frozenset({Found.LARGEST, Found.MASS, Found.ENTROPY})


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of R rows."""

    words: Words = field(repr=False)  # [7 * R + M]
    num_rows: int

    def of(self, found: Found) -> NDArray[Any]:
        """One column [R]: float32 for LARGEST, MASS and ENTROPY, int32 for the others."""
        column = self.words[found * self.num_rows : (found + 1) * self.num_rows]
        return column.view(np.float32) if found in _REAL else column

    @property
    def support_probs(self) -> NDArray[np.float32]:
        """[M]."""
        return self.words[len(Found) * self.num_rows :].view(np.float32)


class Launch(Protocol):
    """Work under way."""

    @property
    def on_device(self) -> torch.Tensor:
        """Results on the device, where the kernels will write them."""
        ...

    def findings(self) -> Findings:
        """Wait for it."""
        ...
