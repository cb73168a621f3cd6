"""Products with a weight that never changes: y = x W^T (+ b).

Contract: ``prepare_weight`` takes a weight ``[N, K]`` and gives a callable ``(x [T, K], bias [N] | None) -> [T, N]``
that owns it, in whatever layout is fastest on its device; the caller drops its own reference, so that there is one
copy. It can take over what comes after a product (``gated``), and leave a part of it to that (``partials``). Quantised
and sharded weights find their place behind the same callable.

Batch-invariant weights also promise that a row of the result has the same bits for any number of rows, any place among
them, and each of the three ways to ask for it: one cut of K and one order of its parts a weight, no atomic additions,
one rounding at the end. A kernel for FP8 weights may promise it if inputs are rounded row by row, by scales that do not
depend on other rows, and scaled sums are added in one order of blocks; one for experts if a row's experts are added in
the order of their numbers, however many rows each expert has.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.linear.reference import PackedWeight, PlainWeight, PreparedWeight, UpcastWeight, can_pack

__all__ = ["PreparedWeight", "prepare_weight"]


_MIN_PACKED_SIZE = 1 << 18
"""Elements; below, what packing saves is less than what calling oneDNN costs (some 20 us)."""

_MOST_FEW_ROWS_SIZE = 1 << 28
"""Elements; above, as in the heads of large vocabularies, cuBLAS reads a weight as fast as memory gives it."""


def prepare_weight(weight: torch.Tensor, *, keep_layout: bool = False, batch_invariant: bool = False) -> PreparedWeight:
    """Choose the fastest layout for ``weight`` [N, K] on its device; with ``keep_layout`` no second copy is made of
    it. ``batch_invariant`` needs kernels, two bytes a number and a multiple of 8 columns.
    """
    if batch_invariant:
        from outrider.kernels.linear.invariant import InvariantWeight  # Triton is slow to import

        return InvariantWeight(weight)
    if has_kernels(weight.device) and weight.numel() <= _MOST_FEW_ROWS_SIZE:
        from outrider.kernels.linear import few_rows  # Triton is slow to import

        return few_rows.FewRowsWeight(weight) if few_rows.pays(weight) else PlainWeight(weight)
    if weight.device.type != "cpu":
        return PlainWeight(weight)
    if weight.numel() >= _MIN_PACKED_SIZE and can_pack(weight.dtype) and not keep_layout:
        return PackedWeight(weight)
    if weight.dtype == torch.bfloat16:
        return UpcastWeight(weight)
    return PlainWeight(weight)
