"""PyTorch references of ``rms_norm``: one for every device, and one with few operations for the CPU."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


class ReferenceNorm:
    """PyTorch's own, which is one kernel on CUDA and a chain of six on CPU."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight  # [N]
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., N] to the same shape."""
        if x.dtype == self._weight.dtype:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        return F.rms_norm(x.to(self._weight.dtype), self._weight.shape, self._weight, self._eps).to(x.dtype)

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` to ``x`` in place and normalize the sum."""
        return self(x.add_(delta))


class FewOpsNorm:
    """RMS norm in four operations, for float32 on CPU, where starting an operation takes longer than running it.

    With n values, sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n), and sqrt(n) is folded into the weight.
    """

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
