"""RMS norm in four operations, for float32 on CPU, where starting an operation takes longer than running it.

With n values, sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n), and sqrt(n) is folded into the weight.
"""

from __future__ import annotations

import math

import torch


class FewOpsNorm:
    """x / hypot(|x|, sqrt(n eps)) * (w sqrt(n))."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.numel()
        self._scaled_weight = weight * math.sqrt(size)  # [N]
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., N] to the same shape."""
        norms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        return (x / norms.hypot_(self._floor)).mul_(self._scaled_weight)

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` to ``x`` in place and normalize the sum."""
        return self(x.add_(delta))
