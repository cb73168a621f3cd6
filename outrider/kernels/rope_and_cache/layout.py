"""Layout of a model's heads, and tables of cosines and sines, for ``rope_and_cache``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
