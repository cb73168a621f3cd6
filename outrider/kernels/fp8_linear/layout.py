"""Operands of FP8 products.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``G`` groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    scale: torch.Tensor | None = None  # [] float32
    """The scale of all values."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rounded inputs."""

    numbers: torch.Tensor  # [T, K] fp8, or x itself where it is not rounded
    scales: torch.Tensor | None  # [G, T or more] float32; None: the scale is part of the weight's, or there is none


def rounded_scale(largest: torch.Tensor) -> torch.Tensor:
    """Scale of numbers whose ``largest`` magnitude is given."""
    return largest.clamp(min=_LEAST) / FP8_MAX
