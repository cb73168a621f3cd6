"""Products with a weight of FP8 numbers (E4M3) and scales: y = x (numbers * scales)^T (+ b).

Contract: ``prepare_fp8_weight`` takes an ``Fp8Matrix`` and the ``Rounding`` of inputs and gives a
``PreparedFp8Weight``. Inputs ``x`` are rounded to FP8 as the ``Rounding`` says, whatever their number. A row's result
does not depend on the other rows where that is asked for; else many rows are multiplied by the library, whose sums may.
Where there are no kernels for the weight it is widened to the type of ``x``, and inputs are rounded to the same
numbers. Rows that round inputs with another scale than those before are a product of their own.
"""

from __future__ import annotations

import torch

from outrider.kernels.fp8_linear.layout import FP8, FP8_MAX, Fp8Matrix, Rounding, alike_parts, rounded_scale
from outrider.kernels.fp8_linear.reference import (
    Fp8Parts,
    Gate,
    PreparedFp8Weight,
    WidenedWeight,
    quantize_rows,
    round_rows,
)
from outrider.kernels.launching import has_kernels

__all__ = [
    "FP8", "FP8_MAX", "Fp8Matrix", "Gate", "PreparedFp8Weight", "Rounding", "prepare_fp8_weight", "quantize_rows",
    "round_rows", "rounded_scale",
]  # fmt: skip


def prepare_fp8_weight(
    matrix: Fp8Matrix, rounding: Rounding, dtype: torch.dtype, *, batch_invariant: bool = False
) -> PreparedFp8Weight:
    """Choose the form that computes fastest on the weight's device, for inputs of ``dtype``; ``batch_invariant``: sums
    are in one order for any number of rows.
    """
    cut = list(alike_parts(matrix, rounding))
    parts = [_prepared(*part, dtype, batch_invariant=batch_invariant) for part in cut]
    return parts[0] if len(parts) == 1 else Fp8Parts(parts, [len(part.numbers) for part, _ in cut])


def _prepared(matrix: Fp8Matrix, rounding: Rounding, dtype: torch.dtype, *, batch_invariant: bool) -> PreparedFp8Weight:
    """Form of a weight with one scale of inputs, if that is given."""
    if has_kernels(matrix.numbers.device):
        from outrider.kernels.fp8_linear import weight  # Triton is slow to import

        if weight.takes(matrix, rounding):
            return weight.Fp8Weight(matrix, rounding, dtype, batch_invariant=batch_invariant)
    return WidenedWeight(matrix, rounding, dtype)
