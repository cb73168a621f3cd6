"""Storing keys and values in their slots, and copying pages.

Contract: ``kv`` is the cache of one layer, ``[num_pages * page_size, 2, H_kv, D]``, with keys at index 0 and values at
1, so that the key and value of a token are adjacent. Slots are distinct and in range; where there are kernels
``store_heads`` writes nothing for slot -1. The others are PyTorch on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.fp8_linear.layout import FP8, FP8_MAX
from outrider.kernels.launching import has_kernels


def store_kv(kv: torch.Tensor, slots: torch.Tensor, key_value: torch.Tensor) -> None:
    """Write ``key_value`` [T, 2, H_kv, D] to ``kv`` [S, 2, H_kv, D] at ``slots`` [T] int64."""
    as_bytes(kv).index_copy_(0, slots, as_bytes(key_value))


def store_heads(
    kv: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write ``keys`` and ``values`` [T, H_kv, D], of any strides, to ``kv`` [S, 2, H_kv, D] at ``slots`` [T]; FP8
    numbers times the ``scales`` are what was written.
    """
    if kv.dtype == FP8:
        keys, values = (in_fp8(part, 1.0 / scale) for part, scale in zip((keys, values), scales, strict=True))
        kv, keys, values = (as_bytes(part) for part in (kv, keys, values))
    if has_kernels(kv.device):
        from outrider.kernels import kv_store_kernel  # Triton is slow to import

        kv_store_kernel.store_heads(kv, slots, keys, values)
    else:
        store_kv(kv, slots.long(), torch.stack((keys, values), dim=1).to(kv.dtype))


def in_fp8(x: torch.Tensor, inverse_scale: float | torch.Tensor) -> torch.Tensor:
    """``x`` times an inverse scale as FP8 numbers, at most the largest one."""
    return (x.float() * inverse_scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, FP8 numbers as bytes, for operations that PyTorch has for no numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def copy_pages(kv_cache: torch.Tensor, copies: Sequence[tuple[int, int]], *, page_size: int) -> None:
    """Copy pages of all layers of ``kv_cache`` [L, S, 2, H_kv, D]; every source is read before any destination is
    written.
    """
    if not copies:
        return
    shape = (kv_cache.shape[0], -1, page_size, *kv_cache.shape[2:])
    pages = as_bytes(kv_cache).view(shape)  # [L, P, page_size, 2, H_kv, D]
    sources, destinations = zip(*copies, strict=True)
    content = pages.index_select(1, torch.tensor(sources, device=kv_cache.device))
    pages.index_copy_(1, torch.tensor(destinations, device=kv_cache.device), content)
