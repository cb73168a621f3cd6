"""PyTorch reference of ``embedding``; runs on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See the contract."""
    return F.embedding(ids, table)
