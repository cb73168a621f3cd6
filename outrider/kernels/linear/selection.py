"""Kernel and tiling of a product of a few rows: one table for each kind of weight.

An entry serves all numbers of rows up to its own, from that of the entry before it; without a tiling, and past the last
entry, cuBLAS is faster. The numbers were found by trying on an H200, in whole forwards where they disagree with what a
product takes alone (docs/decisions/products.md). A program uses so much shared memory that no two share a
multiprocessor: programs that are launched early would otherwise gather where the kernel before them ended first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """Division of a product into programs."""

    width: int
    rest: int
    """A program takes ``width`` and ``rest`` rows of x together at most."""
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    fetched: int
    """Columns of the weight that are fetched before the kernel ahead has ended."""

    def groups_of(self, num_tokens: int) -> int:
        """Programs that share a tile of the weight, each with rows of x of its own."""
        return -(-num_tokens // (self.width + self.rest))


Table = Sequence[tuple[int, Tiling | None]]
"""(most rows, tiling) in ascending order; None: cuBLAS."""

FEWEST_ROWS = 6
"""Least number of rows of the products below; for fewer, ``skinny`` and ``gemv`` leave the rest to others here
too."""

_TOO_FEW = (FEWEST_ROWS - 1, None)

# o and down of an 8B: two programs for each tile of 64 rows of the weight fill the device.
_HALVES: Table = (
    _TOO_FEW,
    (16, Tiling(16, 0, 64, 128, 2, 4, 6, 512)),
    (32, Tiling(32, 0, 64, 128, 2, 4, 6, 128)),
    (64, Tiling(64, 0, 64, 128, 2, 4, 6, 128)),
    (80, Tiling(64, 16, 64, 128, 2, 4, 4, 128)),
    (96, Tiling(64, 32, 64, 128, 2, 4, 4, 128)),
    (128, Tiling(128, 0, 64, 128, 2, 4, 4, 128)),
    (160, Tiling(128, 32, 64, 64, 2, 4, 7, 128)),
    (192, Tiling(128, 64, 64, 64, 2, 4, 6, 128)),
    (256, Tiling(128, 0, 128, 64, 2, 4, 6, 128)),  # two groups of rows share a tile
)

# o and down of a 1B: four.
_QUARTERS: Table = (
    _TOO_FEW,
    (16, Tiling(16, 0, 64, 128, 4, 4, 6, 512)),
    (32, Tiling(32, 0, 64, 128, 4, 4, 6, 128)),
    (64, Tiling(64, 0, 64, 128, 4, 4, 4, 128)),  # deeper, each would be over before it is that deep
    (80, Tiling(64, 16, 64, 128, 4, 4, 4, 128)),
    (128, Tiling(128, 0, 64, 128, 4, 4, 4, 128)),
    (160, Tiling(128, 32, 64, 64, 4, 4, 7, 128)),
)

# qkv of an 8B: four programs share three tiles.
_STREAM_K: Table = (
    _TOO_FEW,
    (16, Tiling(16, 0, 64, 128, 1, 4, 10, 128)),
    (32, Tiling(32, 0, 64, 128, 1, 4, 6, 128)),
    (64, Tiling(64, 0, 64, 128, 1, 4, 6, 128)),
    (80, Tiling(64, 16, 64, 128, 1, 4, 6, 128)),
    (96, Tiling(64, 32, 64, 128, 1, 4, 4, 128)),
    (128, Tiling(128, 0, 64, 128, 1, 4, 4, 128)),
)

# gate and up, with what follows them.
_GATED: Table = (
    _TOO_FEW,
    (16, Tiling(16, 0, 64, 128, 1, 4, 5, 256)),
    (32, Tiling(32, 0, 64, 128, 1, 4, 4, 0)),
    (64, Tiling(64, 0, 64, 128, 1, 4, 4, 0)),
    (80, Tiling(64, 16, 64, 128, 1, 4, 4, 0)),
    (96, Tiling(64, 64, 128, 64, 1, 8, 4, 0)),
    (128, Tiling(128, 0, 64, 64, 1, 4, 3, 0)),
    (240, None),
    (256, Tiling(256, 0, 64, 64, 1, 8, 4, 0)),
)
# The library's kernel for this many rows is faster than those for fewer, of qkv of an 8B.
_LIBRARY_ROWS = ((160, 192), (256, 384))

SPLITS = {2: _HALVES, 4: _QUARTERS}
"""Tables by the number of parts of K that fill a device."""


def split_tiling(num_rows: int, splits: int) -> Tiling | None:
    """Tiling of ``split_k`` with this many parts of K."""
    return _look_up(SPLITS[splits], num_rows)


def widest_split(splits: int) -> Tiling:
    """Tiling of ``split_k`` with this many parts of K for the most rows of its table; more rows take more programs."""
    return next(tiling for _, tiling in reversed(SPLITS[splits]) if tiling is not None)


def stream_k_tiling(num_rows: int) -> Tiling | None:
    """Tiling of ``stream_k``."""
    return _look_up(_STREAM_K, num_rows)


def gate_tiling(num_rows: int) -> Tiling | None:
    """Tiling of ``split_k``'s gated product."""
    return _look_up(_GATED, num_rows)


def library_rows(num_rows: int) -> int:
    """Rows with which cuBLAS computes a product of ``num_rows`` fastest, where ``stream_k`` computes those of fewer."""
    return next((most for fewest, most in _LIBRARY_ROWS if fewest < num_rows <= most), num_rows)


def _look_up(table: Table, num_rows: int) -> Tiling | None:
    return next((tiling for most, tiling in table if num_rows <= most), None)
