"""PyTorch reference of ``rms_norm``; runs on every device."""

from __future__ import annotations

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
