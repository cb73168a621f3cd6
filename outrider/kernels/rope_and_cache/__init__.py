"""RoPE and KV cache write in one kernel, between the fused query-key-value product and attention.

Contract: ``qkv [T, (H + 2 H_kv) * D]`` holds each token's query heads, key heads and value heads. Query and key heads
are normalised head by head (with ``norm_weight [H + H_kv, D]``; None: not) and rotated by their token's angles.
Keys and values go to ``kv [S, 2, H_kv, D]`` at ``slots [T]``, as FP8 (E4M3) numbers where the cache has that type,
divided by the scales of the ``HeadLayout`` and of magnitude 448 at most. Slots are distinct; on a GPU the slot -1
writes nothing, for the padding tokens of a captured shape (on a CPU there is no padding). The queries ``[T, H, D]`` are
returned, a view of ``qkv``, which is overwritten. With ``H_kv`` 0 nothing is stored. Where there are kernels, ``qkv``
may be the partial sums of a split-K product, ``[A, T, (H + 2 H_kv) * D]`` float32, which are only read; their sum has
the model's type, and the queries have memory of their own.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.rope_and_cache import reference
from outrider.kernels.rope_and_cache.reference import CosSin, HeadLayout

__all__ = ["CosSin", "HeadLayout", "apply_rope_and_cache"]


def apply_rope_and_cache(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: CosSin,
    heads: HeadLayout,
    *,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate ``qkv`` [T, (H + 2 H_kv) * D] or its partial sums, and write keys and values to ``kv``.

    Returns the queries [T, H, D].
    """
    if has_kernels(qkv.device):
        from outrider.kernels.rope_and_cache import kernel  # Triton is slow to import

        return kernel.apply_rope_and_cache(qkv, kv, slots, cos_sin, heads, norm_weight=norm_weight)
    return reference.apply_rope_and_cache(qkv, kv, slots, cos_sin, heads, norm_weight=norm_weight)
