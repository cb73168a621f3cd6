"""Operands of FP8 products.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``G`` groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_LEAST = 1e-10
"""Largest magnitude of a group at least, so that zeros have a scale."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight: ``numbers`` times the scale of their rows and columns."""

    numbers: torch.Tensor  # [N, K] fp8
    scales: torch.Tensor  # [ceil(N / rows), ceil(K / columns)] float32
    rows: int
    """Rows that share a scale."""
    columns: int
    """Columns that share a scale; K for one scale a row."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of a product's input [T, K] to FP8 numbers."""

    group: int | None
    """Values of a row that share a scale, which is that of the largest; K for all of a row; None: no rounding, unless
    ``scale`` is given.
    """
    scale: torch.Tensor | None = None  # [], [E] or [N] float32
    """Scale of all values, of those that meet each expert, or of those that meet each row of the weight."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rounded inputs."""

    numbers: torch.Tensor  # [T, K] fp8, or x itself where it is not rounded
    scales: torch.Tensor | None  # [G, T or more] float32; None: the scale is part of the weight's, or there is none


def alike_parts(matrix: Fp8Matrix, rounding: Rounding, num_experts: int = 1) -> Iterator[tuple[Fp8Matrix, Rounding]]:
    """Parts [E * n, K] of a weight [E * N, K], of whose rows each may have a scale of inputs: parts have one scale, or
    one for each expert.
    """
    scale = rounding.scale
    if scale is None or not scale.dim():
        yield matrix, rounding
        return
    scales = scale.view(num_experts, -1)
    starts = (scales[:, 1:] != scales[:, :-1]).any(0).nonzero().flatten() + 1
    for start, stop in pairwise([0, *starts.tolist(), scales.shape[1]]):
        own, rows = scales[:, start], slice(start // matrix.rows, -(-stop // matrix.rows))
        part = Fp8Matrix(
            matrix.numbers.view(num_experts, -1, matrix.numbers.shape[1])[:, start:stop].flatten(0, 1),
            matrix.scales.view(num_experts, -1, matrix.scales.shape[1])[:, rows].flatten(0, 1),
            matrix.rows,
            matrix.columns,
        )
        yield part, Rounding(None, own[0] if (own == own[0]).all() else own)


def rounded_scale(largest: torch.Tensor) -> torch.Tensor:
    """Scale of numbers whose ``largest`` magnitude is given."""
    return largest.clamp(min=_LEAST) / FP8_MAX
