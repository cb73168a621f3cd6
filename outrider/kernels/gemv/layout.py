"""Operands of ``gemv``, and the shapes that it suits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_TOKENS = 1
"""More are better served by the matrix unit: of a 1B shape on an H200 two take 1.08 ms a forward so, 0.97 there, and
one 0.78. The kernels take two all the same.
"""
_MAX_SIZE, _MAX_WIDE_SIZE = 2048, 8192
"""Longest row of a weight of many rows, and of one of few: a program holds whole rows."""
_FEW_ROWS = 2048


def suits(weight: torch.Tensor) -> bool:
    """True if these kernels were measured to be faster for a weight [N, K]: those of a 1B shape; larger ones were not
    tried.
    """
    rows, size = weight.shape
    return size <= _MAX_SIZE or (size <= _MAX_WIDE_SIZE and rows <= _FEW_ROWS)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight and its bias."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class NormedInput:
    """Input of a product before addition and normalization."""

    hidden: torch.Tensor  # [T, K]
    delta: torch.Tensor | None  # [T, K], or partial sums [A, T, K] where a kernel takes them; None: nothing to add
    norm_weight: torch.Tensor  # [K]
    eps: float
