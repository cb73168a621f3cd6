"""Heads and rotations of ``rope_and_cache``, and its PyTorch reference for every device, which knows no slot -1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.kernels.kv_store import in_fp8, store_kv


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The heads in a fused query-key-value product."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of the normalisation of queries and keys, if there is one."""
    key_scale: float = 1.0
    value_scale: float = 1.0
    """Scale of a cache of FP8 numbers: its product with them is keys and values."""

    @property
    def inverse_scales(self) -> tuple[float | None, float | None]:
        """Inverse scales, by which keys and values are multiplied to be numbers of the cache; None: 1."""
        is_one = self.key_scale == self.value_scale == 1.0
        return (None, None) if is_one else (1.0 / self.key_scale, 1.0 / self.value_scale)


@dataclass(frozen=True, slots=True)
class CosSin:
    """Rotation of each token's heads: x * cos + (halves of x swapped) * sin."""

    cos: torch.Tensor  # [R, 1, D], both halves alike
    sin: torch.Tensor  # [R, 1, D], negative in the first half
    rows: torch.Tensor | None = None  # [T], each token's row of the two; None: R = T, its own


def apply_rope_and_cache(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: CosSin,
    heads: HeadLayout,
    *,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract. Turning happens in place, so that a token's key and value stay side by side and are stored at
    once.
    """
    every_head = qkv.view(qkv.shape[0], -1, heads.head_dim)  # [T, H + 2 H_kv, D]
    turned = every_head.narrow(1, 0, heads.num_heads + heads.num_kv_heads)
    source = turned
    if norm_weight is not None:
        source = F.rms_norm(turned, (heads.head_dim,), eps=heads.eps).mul_(norm_weight)
    _rotate(source, _per_token(cos_sin), out=turned)
    if heads.num_kv_heads:
        stored = every_head[:, heads.num_heads :].view(-1, 2, heads.num_kv_heads, heads.head_dim)
        store_kv(kv, slots, stored if kv.dtype == stored.dtype else _in_fp8(stored, heads))
    return every_head.narrow(1, 0, heads.num_heads)


def _in_fp8(stored: torch.Tensor, heads: HeadLayout) -> torch.Tensor:
    """Keys and values [T, 2, H_kv, D] as FP8 numbers."""
    inverse = [1.0 if scale is None else scale for scale in heads.inverse_scales]
    return in_fp8(stored, torch.tensor(inverse, device=stored.device)[:, None, None])


def _per_token(cos_sin: CosSin) -> CosSin:
    if cos_sin.rows is None:
        return cos_sin
    return CosSin(cos_sin.cos.index_select(0, cos_sin.rows), cos_sin.sin.index_select(0, cos_sin.rows))


def _rotate(source: torch.Tensor, cos_sin: CosSin, out: torch.Tensor) -> None:
    """Turn ``source`` [T, H, D] (overwritten) into ``out``, which may be ``source``."""
    swapped = source.roll(source.shape[-1] // 2, -1)
    torch.addcmul(source.mul_(cos_sin.cos), swapped, cos_sin.sin, out=out)
