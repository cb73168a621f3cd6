"""The gate of an MLP: silu(gate) * up, or gelu(gate) * up with gelu's approximation by tanh.

Contract: ``swiglu``, ``geglu`` and ``clamped_swiglu`` take ``gate_up [T, 2 N]``, gates first, and give ``[T, N]``;
they may overwrite their input.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.swiglu import reference

__all__ = ["clamped_swiglu", "geglu", "swiglu"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to [T, N]."""
    if has_kernels(gate_up.device):
        from outrider.kernels.swiglu import kernel  # Triton is slow to import

        return kernel.swiglu(gate_up)
    return reference.swiglu(gate_up)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to [T, N]."""
    if has_kernels(gate_up.device):
        from outrider.kernels.swiglu import kernel  # Triton is slow to import

        return kernel.swiglu(gate_up, is_gelu=True)
    return reference.geglu(gate_up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to (up + 1) * gate * sigmoid(alpha * gate) [T, N], with gates of at most ``limit`` and ups
    from -``limit`` to ``limit``.
    """
    if has_kernels(gate_up.device):
        from outrider.kernels.swiglu import kernel  # Triton is slow to import

        return kernel.swiglu(gate_up, clamp=(alpha, limit))
    return reference.clamped_swiglu(gate_up, alpha, limit)
