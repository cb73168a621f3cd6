"""Rows in order of size, equal values by lowest id: the same for every device, batch and library version.

A float and an id are packed into one integer, so that one sort settles both. Knows nothing of what the values mean.

Shape letters: ``N`` rows, ``V`` values in a row, ``W`` of them wanted.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SORT_LIMIT = 32768
"""On the CPU numpy's vectorised sort of whole rows beats a partial one up to about this size (measured)."""


def largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:  # [N, V] float32 -> [N, W] float32, int64
    """The ``width`` largest of each row, best first, and their ids; no value may be NaN."""
    size = values.shape[-1]
    low = torch.arange(size - 1, -1, -1, dtype=torch.int32, device=values.device).expand(values.shape)
    high = _reflect(values.contiguous().view(torch.int32))
    keys = torch.stack((low, high), dim=-1).view(torch.int64).squeeze(-1)
    halves = _largest_keys(keys, width).unsqueeze(-1).view(torch.int32)  # [N, W, 2]
    return _reflect(halves[..., 1].contiguous()).view(torch.float32), (size - 1) - halves[..., 0].to(torch.int64)


def _reflect(bits: Tensor) -> Tensor:  # int32
    """Bits of floats to integers in the same order, and back: below zero they count the wrong way round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest_keys(keys: Tensor, width: int) -> Tensor:  # [N, V] -> [N, W]
    if keys.device.type == "cpu" and keys.shape[-1] <= _SORT_LIMIT:
        return torch.from_numpy(np.sort(keys.numpy(), axis=-1)[:, : -width - 1 : -1].copy())
    return keys.topk(width, dim=-1).values


def ascending(values: Tensor) -> Tensor:  # [N, V] float32
    """Each row sorted."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def leading_mass(ordered: Tensor, mass: Tensor | float) -> Tensor:  # [N, W] float32, [N, 1] -> [N, W] bool
    """Which of the ordered probabilities make up the smallest leading run with at least this mass.

    The one that crosses is in, zeros are out. Sums run in float64 from the left, so a row's answer does not depend on
    ``W``.
    """
    doubles = ordered.to(torch.float64)
    before = doubles.cumsum(-1) - doubles
    return (before < mass) & (ordered > 0)
