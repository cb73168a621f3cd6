"""Shapes of a Gated DeltaNet layer, and the rows of a forward over its states.

Shape letters: ``T`` tokens, ``B`` rows, ``S`` slots, ``R`` tokens of a log, ``H`` heads, ``G`` key heads, ``K`` and
``V`` features of keys and values, ``C`` channels of the convolution: 2 G K + H V.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one rank's part of a layer."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def num_channels(self) -> int:
        """C: queries, keys and values of one token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def num_inputs(self) -> int:
        """Numbers of one token that the recurrence reads: channels, then a rate and a decay for each head."""
        return self.num_channels + 2 * self.num_heads


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of the convolution and of the gates."""

    taps: torch.Tensor  # [C, num_taps] float32
    decay: torch.Tensor  # [H] float32, -exp(A_log)
    bias: torch.Tensor  # [H] float32, dt_bias


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of a forward, as ``StateInputs`` has them."""

    query_starts: torch.Tensor  # [B + 1]
    context_lengths: torch.Tensor  # [B]
    token_slots: torch.Tensor  # [T] of the KV cache; -1 of a row's first: it goes on without the row
    slots: torch.Tensor  # [B] -1: the row is none
    starts: torch.Tensor  # [B]
    ends: torch.Tensor  # [B]
    in_chunks: bool = field(default=False, kw_only=True)
    """True if kernels compute rows of more tokens than the log holds in chunks, faster than one token after the other
    but with other roundings for each division into forwards.
    """


class DeltaSlots(NamedTuple):
    """States of all slots in one layer, or in all layers, with an axis before the others."""

    states: torch.Tensor  # [S, H, K, V] float32
    logs: torch.Tensor  # [S, R, N] inputs of the token at position p at p % R
