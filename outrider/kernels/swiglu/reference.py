"""PyTorch reference of ``swiglu``; runs on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to [T, N]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to [T, N]."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to [T, N]."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
