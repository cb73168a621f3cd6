"""Room behind the rows of an activation, so that a product may read whole tiles of them.

TMA takes longer for a tile that ends beyond its matrix than for one with rows that are not needed, and some of the
library's kernels are faster for more rows. What is computed of such rows is never stored, or never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_TILES = (16, 32, 64, 80, 128, 160, 192, 256, 384)
"""Rows of whole tiles, as the tables of ``linear.selection`` have them."""


def empty_rows(
    num_rows: int,
    *sizes: int,
    dtype: torch.dtype,
    device: torch.device,
    tiles: Sequence[int] = _TILES,
    step: int = 1,
) -> torch.Tensor:
    """[T, *sizes], uninitialised, with memory behind it up to the next number of rows that ``tiles`` have; of more rows
    than these up to a multiple of ``step``.
    """
    room = next((rows for rows in tiles if rows >= num_rows), -(-num_rows // step) * step)
    return torch.empty(room, *sizes, dtype=dtype, device=device)[:num_rows]


def with_room(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``x`` [T, K] as [num_rows, K], with whatever lies behind it; ``x`` itself where there is not so much memory."""
    end = x.storage_offset() + num_rows * x.shape[1]
    has_room = x.is_contiguous() and end * x.element_size() <= x.untyped_storage().nbytes()
    return x.as_strided((num_rows, x.shape[1]), x.stride()) if has_room and num_rows > x.shape[0] else x
