"""Root-mean-square normalisation with a weight that never changes: y = x / sqrt(mean(x^2) + eps) * w.

Contract: ``prepare_norm`` takes a weight ``[N]`` and gives a callable ``x [..., N] -> [..., N]`` that does not change
``x``. Its ``after_adding(x, delta)`` adds ``delta`` to ``x`` in place, both ``[T, N]``, and normalises the sum. Where
there are kernels, ``delta`` may be what a product left to be added up: ``[A, T, N]`` float32.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.rms_norm.reference import FewOpsNorm, ReferenceNorm

__all__ = ["PreparedNorm", "prepare_norm"]


class PreparedNorm(Protocol):
    """A normalization that is ready to compute."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., N] to the same shape."""
        ...

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` [T, N] to ``x`` [T, N] in place and normalize the sum."""
        ...


def prepare_norm(weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> PreparedNorm:
    """Choose the fastest implementation for ``weight`` [N] on its device; ``dtype`` is the inputs', None: its own."""
    if has_kernels(weight.device):
        from outrider.kernels.rms_norm.kernel import TritonNorm  # Triton is slow to import

        return TritonNorm(weight, eps)
    if weight.device.type == "cpu" and (dtype or weight.dtype) == weight.dtype == torch.float32:
        return FewOpsNorm(weight, eps)
    return ReferenceNorm(weight, eps)
