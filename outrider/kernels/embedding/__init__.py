"""Embedding lookup.

Contract: ``table [V, N]`` and ``ids [T]``, integers of any size from 0 to V - 1, give ``[T, N]`` in new memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels.launching import has_kernels

__all__ = ["look_up"]


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the rows ``ids`` [T] of ``table`` [V, N]: [T, N]."""
    if has_kernels(table.device):
        from outrider.kernels.embedding import kernel  # Triton is slow to import

        return kernel.look_up(ids, table)
    return F.embedding(ids, table)
