"""Sorting of rows by size, equal values by lowest id: the same for every device, batch and library version.

A float and an id are packed into one integer, so one sort orders both.

Shape letters: ``N`` rows, ``V`` values in a row, ``W`` of them wanted.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SORT_LIMIT = 32768
"""Row length up to about which numpy's vectorised sort of whole rows beats a partial one on the CPU (measured)."""
_BLOCK = 64
"""Neighbouring values of which the largest is found first."""


def largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:  # [N, V] float32 -> [N, W] float32, int64
    """The ``width`` largest of each row, best first, and their ids; no value may be NaN."""
    has_blocks = values.shape[-1] % _BLOCK == 0 and width <= values.shape[-1] // _BLOCK // 8
    return largest_of_blocks(values, width) if values.is_cuda and has_blocks else _largest(values, width)


def largest_of_blocks(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """``largest``, found in the ``width`` blocks with the largest values: what lies in none of them is smaller than the
    best of each. The other blocks are read once. Needs whole blocks, and at least ``width`` of them.
    """
    blocks = values.reshape(len(values), -1, _BLOCK)
    _, found = _largest(blocks.amax(-1), width)
    chosen = found.sort(-1).values.unsqueeze(-1)  # of equal values those with the lowest ids come first
    ids = (chosen * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
    best, places = _largest(values.gather(-1, ids), width)
    return best, ids.gather(-1, places)


def _largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    size = values.shape[-1]
    high = _reflect(values.contiguous().view(torch.int32))
    if values.device.type == "cpu" and size <= _SORT_LIMIT:
        halves = torch.from_numpy(_sorted_halves(high.numpy(), width))
    else:
        low = torch.arange(size - 1, -1, -1, dtype=torch.int32, device=values.device).expand(values.shape)
        keys = torch.stack((low, high), dim=-1).view(torch.int64).squeeze(-1)
        halves = keys.topk(width, dim=-1).values.unsqueeze(-1).view(torch.int32)  # [N, W, 2]
    return _reflect(halves[..., 1].contiguous()).view(torch.float32), (size - 1) - halves[..., 0].to(torch.int64)


def _sorted_halves(high: NDArray[np.int32], width: int) -> NDArray[np.int32]:  # [N, V] -> [N, W, 2]
    keys = np.empty(high.shape, dtype=np.int64)
    halves = keys.view(np.int32).reshape(*high.shape, 2)
    halves[..., 0] = np.arange(high.shape[-1] - 1, -1, -1, dtype=np.int32)
    halves[..., 1] = high
    keys.sort(axis=-1)
    # A copy whatever the shape: numpy calls an axis of one contiguous with a negative stride, which torch refuses.
    return halves[:, : -width - 1 : -1].copy()


def _reflect(bits: Tensor) -> Tensor:  # int32
    """Bits of floats to integers in the same order, and back: below zero they count the wrong way round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def ascending(values: Tensor) -> Tensor:  # [N, V] float32
    """Each row sorted."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def leading_mass(ordered: Tensor, mass: Tensor | float) -> tuple[Tensor, Tensor]:  # [N, W] float32
    """The smallest leading run of the ordered probabilities with at least this mass, one number or [N, 1].

    Gives which are in it, [N, W] bool, and the running sums, [N, W] float64. The one that crosses is in, zeros are
    out. Sums run from the left, so a row's answer does not depend on ``W``.
    """
    doubles = ordered.to(torch.float64)
    sums = doubles.cumsum(-1)
    return (sums - doubles < mass) & (ordered > 0), sums
