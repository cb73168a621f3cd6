"""PyTorch reference of ``gemv``: its parts, one by one; runs on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels.gemv.layout import Matrix, NormedInput
from outrider.kernels.rope_and_cache import CosSin, HeadLayout
from outrider.kernels.rope_and_cache.reference import apply_rope_and_cache
from outrider.kernels.swiglu.reference import swiglu


def product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """See the contract."""
    return F.linear(x, matrix.weight, matrix.bias)


def gated(source: NormedInput, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    hidden, x = _normed(source)
    return hidden, swiglu(product(x, matrix))


def qkv_with_rope(
    source: NormedInput,
    matrix: Matrix,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos_sin: CosSin,
    heads: HeadLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    hidden, x = _normed(source)
    return hidden, apply_rope_and_cache(product(x, matrix), kv, slots, cos_sin, heads)


def _normed(source: NormedInput) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = source.hidden if source.delta is None else source.hidden + source.delta
    return hidden, F.rms_norm(hidden, (hidden.shape[-1],), source.norm_weight, source.eps)
