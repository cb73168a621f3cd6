"""Prepared FP8 weight on a GPU: rounding of the inputs, then the product."""

from __future__ import annotations

import dataclasses

import torch

from outrider.kernels.fp8_linear.kernel import BLOCK_K, Fp8Tiling, fp8_product
from outrider.kernels.fp8_linear.layout import Fp8Matrix, Rounded, Rounding
from outrider.kernels.fp8_linear.library import library_product, library_takes
from outrider.kernels.fp8_linear.reference import Gate, PreparedFp8Weight
from outrider.kernels.fp8_linear.rounding import normed_and_rounded, rounded
from outrider.kernels.gemv import NormedInput
from outrider.kernels.launching import launches_early, num_processors
from outrider.kernels.linear.split_k import sum_partials

_MOST_SPLIT_ROWS = 256
"""Rows of x up to which each part of K has a program of its own."""
_OWN_ROWS = ((8192, 64), (4097, 128), (1, 256))
"""(least rows of a weight, rows of x up to which our kernel is faster than the library's product), half as many where
scales are of groups; found with products of 8B and 32B shapes on an H200.
"""
_LEAST_BLOCKS = 8
"""Blocks of K in a part."""
_FILLED = 0.7
"""Programs for each multiprocessor at least."""
_FEW: tuple[tuple[int, Fp8Tiling], ...] = (
    (16, Fp8Tiling(16, 64, 4, 9)),
    (32, Fp8Tiling(32, 64, 4, 6)),
    (64, Fp8Tiling(64, 64, 4, 4)),
    (128, Fp8Tiling(64, 128, 8, 5)),
)
_MANY: tuple[tuple[int, Fp8Tiling], ...] = (
    (16, Fp8Tiling(16, 64, 4, 9)),
    (32, Fp8Tiling(32, 64, 4, 4)),
    (64, Fp8Tiling(64, 64, 4, 4)),
    (128, Fp8Tiling(128, 64, 4, 4)),
)
"""(most rows, tiling) of weights with few and with many rows, found by trying products of an 8B shape on an H100."""
_LARGE, _LARGE_PARTS = Fp8Tiling(128, 128, 4, 3), Fp8Tiling(128, 128, 8, 4)
_GROUPS: tuple[tuple[int, Fp8Tiling], ...] = ((256, Fp8Tiling(128, 64, 4, 4)), (1 << 62, Fp8Tiling(128, 64, 4, 3)))
"""Tilings for more rows; with several parts of K, or scales of groups, a program has registers for fewer."""


class Fp8Weight(PreparedFp8Weight):
    """FP8 numbers and scales, multiplied as they are."""

    def __init__(
        self, matrix: Fp8Matrix, rounding: Rounding, dtype: torch.dtype, *, batch_invariant: bool = False
    ) -> None:
        if rounding.scale is not None:  # one scale for the product: inputs have none of their own
            matrix = dataclasses.replace(matrix, scales=matrix.scales * rounding.scale)
        self._matrix, self._rounding, self._dtype = matrix, rounding, dtype
        self.rounds_normed = rounding.group is not None or rounding.scale is not None
        processors = num_processors(matrix.numbers.device)
        out_features, size = matrix.numbers.shape
        self.splits = num_splits(out_features, size, processors)
        has_many = out_features > 2 * 64 * processors
        has_groups = matrix.scales.shape[1] > 1 or (rounding.group or size) < size
        self._has_groups = has_groups  # for which the library was not tried with a bias
        large = _LARGE if has_many else _LARGE_PARTS
        self._most_rows = 1 << 62  # of our kernel
        if not batch_invariant and library_takes(matrix, rounding, dtype):
            own_rows = next(rows for least, rows in _OWN_ROWS if out_features >= least)
            self._most_rows = own_rows // (2 if has_groups else 1)
        few = _MANY if has_many else _FEW
        self._tilings = (*few, *(_GROUPS if has_groups else ((1 << 62, large),)))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return self._product(rounded(x, self._rounding), bias, may_be_partial=False)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 partials [A, T, N] whose sum over A is the product."""
        return self._product(rounded(x, self._rounding), bias, may_be_partial=True)

    def of_normed(self, source: NormedInput, bias: torch.Tensor | None, *, may_be_partial: bool) -> torch.Tensor:
        """The norm's kernel rounds."""
        return self._product(normed_and_rounded(source, self._rounding), bias, may_be_partial=may_be_partial)

    def of_gates(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, *, gate: Gate, may_be_partial: bool
    ) -> torch.Tensor:
        """The gate's kernel rounds."""
        return self._product(rounded(gate_up, self._rounding, gate), bias, may_be_partial=may_be_partial)

    def _product(self, x: Rounded, bias: torch.Tensor | None, *, may_be_partial: bool) -> torch.Tensor:
        num_tokens, dtype = x.numbers.shape[0], self._dtype
        if not num_tokens:
            return torch.empty(0, self._matrix.numbers.shape[0], dtype=dtype, device=x.numbers.device)
        if num_tokens > self._most_rows and (bias is None or not self._has_groups):
            return library_product(x, self._matrix, bias, dtype)
        tiling = next(tiling for most, tiling in self._tilings if num_tokens <= most)
        is_split = self.splits > 1 and num_tokens <= _MOST_SPLIT_ROWS
        out_dtype = None if is_split else dtype
        found = fp8_product(x, self._matrix, bias, splits=self.splits, tiling=tiling, dtype=out_dtype)
        if is_split and not (may_be_partial and bias is None):
            return sum_partials(found, bias, dtype)
        return found


def takes(matrix: Fp8Matrix, rounding: Rounding) -> bool:
    """True if these kernels compute products with this weight."""
    size = matrix.numbers.shape[1]
    is_there = launches_early(matrix.numbers.device) or matrix.numbers.device.type == "cpu"  # where it is but tested
    columns = all(one in (size, BLOCK_K, None) or one >= size for one in (matrix.columns, rounding.group))
    return is_there and columns and size % 16 == 0


def num_splits(out_features: int, size: int, num_processors: int) -> int:
    """Number of parts of K: as many as nearly give each multiprocessor a program, by the weight alone."""
    tiles, splits = -(-out_features // 64), 1
    while tiles * splits < _FILLED * num_processors and size >= 2 * splits * _LEAST_BLOCKS * BLOCK_K:
        splits *= 2
    return splits
