"""Storing keys and values in their slots, and copying pages.

Contract: ``kv`` is the cache of one layer, ``[num_pages * page_size, 2, H_kv, D]``, with keys at index 0 and values at
1, so that the key and value of a token are adjacent. Slots are distinct and in range. PyTorch on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def store_kv(kv: torch.Tensor, slots: torch.Tensor, key_value: torch.Tensor) -> None:
    """Write ``key_value`` [T, 2, H_kv, D] to ``kv`` [S, 2, H_kv, D] at ``slots`` [T] int64."""
    kv.index_copy_(0, slots, key_value)


def copy_pages(kv_cache: torch.Tensor, copies: Sequence[tuple[int, int]], *, page_size: int) -> None:
    """Copy pages of all layers of ``kv_cache`` [L, S, 2, H_kv, D]; every source is read before any destination is
    written.
    """
    if not copies:
        return
    pages = kv_cache.view(kv_cache.shape[0], -1, page_size, *kv_cache.shape[2:])  # [L, P, page_size, 2, H_kv, D]
    sources, destinations = zip(*copies, strict=True)
    content = pages.index_select(1, torch.tensor(sources, device=kv_cache.device))
    pages.index_copy_(1, torch.tensor(destinations, device=kv_cache.device), content)
