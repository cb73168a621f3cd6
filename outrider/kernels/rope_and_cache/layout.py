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
    """Of the normalisation of queries and keys, where there is one."""


@dataclass(frozen=True, slots=True)
class CosSin:
    """By how much each token's heads are turned: x * cos + (halves of x swapped) * sin."""

    cos: torch.Tensor  # [R, 1, D], both halves alike
    sin: torch.Tensor  # [R, 1, D], negative in the first half
    rows: torch.Tensor | None = None  # [T], each token's row of the two; None: R = T, its own
