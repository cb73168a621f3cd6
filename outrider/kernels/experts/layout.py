"""Operands of products with experts (mixture of experts, MoE).

Shape letters: ``T`` tokens, ``E`` experts, ``A`` experts of a token, ``P`` = A * T pairs of a token and an expert in
the order of [A, T], ``K`` features in, ``N`` features out.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """Pairs sorted by expert, and their division into tiles of pairs that share an expert."""

    order: torch.Tensor  # [P] int32, pairs by expert
    tiles: torch.Tensor  # [M, 3] int32: expert, first place in ``order``, number of pairs; 0 pairs in unused ones
    width: int
    """Pairs of a tile at most."""


@dataclass(frozen=True, slots=True)
class SigmoidScores:
    """Scores of experts that are sigmoids of logits, and by which experts are chosen only from some groups."""

    bias: torch.Tensor  # [E] float32, added where experts are chosen, but not to their weights
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Neighbouring experts, as many in each group."""
    num_groups_chosen: int = 1
    """Groups with the largest sums of their two best scores."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of each token."""

    expert_ids: torch.Tensor  # [A, T] int32, by falling weight
    weights: torch.Tensor  # [A, T] float32
    tiles: TokenTiles | None = None
    """Tiles for kernels; None: on a CPU."""
    is_partial: bool = False
    """True if some pairs are of experts elsewhere, which no id from 0 to E - 1 names: their weighted products are 0,
    others are not written."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A weight of FP4 numbers (E2M1) times powers of two (E8M0), one for each 32 columns of a row."""

    numbers: torch.Tensor  # [R, K / 2] uint8; the even column of two is in the low bits
    scales: torch.Tensor  # [R, K / 32] uint8: exponents + 127


class ExpertWeight(Protocol):
    """Weights of all experts of a layer, [E, N, K], ready for grouped products (grouped GEMM)."""

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, routing: Routing, bias: torch.Tensor | None, *, is_weighted: bool = False
    ) -> torch.Tensor:
        """``x`` [T, K], or [P, K] with a row for each pair, and ``bias`` [E * N] to [P, N]; weighted by the
        ``routing``, float32 [A, T, N].
        """
        ...
