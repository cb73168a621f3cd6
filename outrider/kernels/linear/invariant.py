"""Batch-invariant weight on a GPU: a row's product has the same bits whatever rows there are besides it.

The number of parts into which K is cut is the weight's own. All kernels here sum a part column by column on the same
matrix unit, and add the parts in order; which of them computes, and with which tiles, follows the number of rows: up
to five ``skinny``, up to 256 ``split_k`` if there are several parts, otherwise ``ordered``.
cuBLAS is not used: it splits K by the number of rows (it gave other bits for 1 to 128 rows of a 4096 x 1024 weight).
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import num_processors
from outrider.kernels.linear import selection, split_k
from outrider.kernels.linear.few_rows import choose_tiling
from outrider.kernels.linear.ordered import OrderedTiling, ordered_product
from outrider.kernels.linear.reference import PreparedWeight
from outrider.kernels.linear.skinny import skinny_product

_MOST_SPLIT_ROWS = 256
"""Up to this many rows each part of K has programs of its own; of more rows there are enough tiles."""

_MANY_ROWS = OrderedTiling(256, 128, 64, 8, 3, per_processor=1)
_TILINGS = (
    (16, OrderedTiling(16, 64, 128, 4, 5, fetched=128)),
    (32, OrderedTiling(32, 64, 128, 4, 4, fetched=128)),
    (64, OrderedTiling(64, 64, 128, 4, 4)),
    (128, OrderedTiling(128, 64, 128, 4, 4)),
    (256, OrderedTiling(128, 128, 64, 8, 4)),
)
_LARGE_TILINGS = ((128, None), (256, _MANY_ROWS))
"""Tilings of weights with many tiles, if they differ."""
_GATED_MANY_ROWS = OrderedTiling(128, 128, 64, 8, 3, band=16, per_processor=1)
_GATED_TILINGS = (
    (16, OrderedTiling(16, 64, 128, 4, 5, fetched=256)),
    (32, OrderedTiling(32, 64, 128, 4, 4)),
    (64, OrderedTiling(64, 64, 128, 4, 4)),
    (128, OrderedTiling(128, 64, 64, 4, 3)),
    (256, OrderedTiling(256, 64, 64, 8, 4)),
)
"""(most rows, tiling), measured on an H100. Tilings do not change a bit."""


class InvariantWeight(PreparedWeight):
    """A 16-bit weight [N, K] whose products do not depend on the number of rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()
        processors = num_processors(weight.device)
        self._skinny = choose_tiling(weight.shape[0], processors)
        self._parts = self._skinny.splits
        tiles = -(-weight.shape[0] // self._skinny.block_n)
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
        self._is_large = weight.shape[0] > _MANY_ROWS.block_n * 2 * processors

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        if _is_skinny(len(x)):
            return skinny_product(x, self._weight, bias, self._counters, self._skinny)
        if self._is_split(len(x)):
            return split_k.sum_partials(self._split(x), bias, x.dtype)
        return ordered_product(x, self._weight, bias, self._tiling(len(x)), parts=self._parts)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 partials [A, T, N] whose sum over A, rounded, is the product."""
        return self._split(x) if bias is None and self._is_split(len(x)) else self(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to silu(gate) * up [T, N / 2] of the two halves of the product."""
        if self._parts > 1 or _is_skinny(len(x)):
            return super().gated(x, bias)
        tiling = _look_up(_GATED_TILINGS, len(x)) or _GATED_MANY_ROWS
        return ordered_product(x, self._weight, bias, tiling, is_gated=True)

    def _is_split(self, num_rows: int) -> bool:
        return self._parts > 1 and selection.FEWEST_ROWS <= num_rows <= _MOST_SPLIT_ROWS

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        tiling = selection.split_tiling(len(x), self._parts)
        return split_k.split_k_partials(x, self._weight, tiling or selection.widest_split(self._parts))

    def _tiling(self, num_rows: int) -> OrderedTiling:
        large = _look_up(_LARGE_TILINGS, num_rows) if self._is_large else None
        return large or _look_up(_TILINGS, num_rows) or _MANY_ROWS


def _is_skinny(num_rows: int) -> bool:
    return 0 < num_rows < selection.FEWEST_ROWS


def _look_up(
    table: tuple[tuple[int, OrderedTiling | None], ...] | tuple[tuple[int, OrderedTiling], ...], num_rows: int
) -> OrderedTiling | None:
    return next((tiling for most, tiling in table if num_rows <= most), None)
