"""What lies between the fused query-key-value product and attention: normalise, turn, store.

Contract: ``qkv [T, (H + 2 H_kv) * D]`` holds each token's query heads, key heads and value heads. Query and key heads
are normalised head by head (with ``norm_weight [H + H_kv, D]``; None: they are not) and turned by their token's angles.
Keys and values go to ``kv [S, 2, H_kv, D]`` at ``slots [T]``, which are distinct; on a GPU the slot -1 writes nothing,
for tokens that only fill up a shape (on a CPU nothing is filled up). Returned are the queries ``[T, H, D]``, a view of
``qkv``, which is overwritten. Where there are kernels, ``qkv`` may be what a product left to be added up, ``[A, T, (H +
2 H_kv) * D]`` float32, which is left alone; the sum is of the cache's type, and the queries have memory of their own.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.rope_and_cache import reference
from outrider.kernels.rope_and_cache.layout import Angles, HeadLayout

__all__ = ["Angles", "HeadLayout", "turn_and_store"]


def turn_and_store(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    angles: Angles,
    heads: HeadLayout,
    *,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and turn ``qkv`` [T, (H + 2 H_kv) * D], or addends of it, store its keys and values; returns the
    queries [T, H, D].
    """
    if has_kernels(qkv.device):
        from outrider.kernels.rope_and_cache import kernel  # Triton is slow to import

        return kernel.turn_and_store(qkv, kv, slots, angles, heads, norm_weight=norm_weight)
    return reference.turn_and_store(qkv, kv, slots, angles, heads, norm_weight=norm_weight)
