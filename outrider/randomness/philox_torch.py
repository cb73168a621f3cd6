"""The random streams on tensors, on any device.

Rows carry their own seed, stream, base and position (``StreamRows``), so one call serves a batch of requests. 32-bit
words live in int64: a product of two wraps round, and both its halves are right after a mask. On the CPU the bits come
from the numpy form, which needs half the time for a few rows (measured: its dispatch is cheaper). Imported by the
engine alone.

Shape letters: ``N`` rows, ``V`` vocabulary, ``S`` tokens chosen in each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.randomness import philox_numpy
from outrider.randomness.streams import (
    KEY_STEPS,
    LANES,
    LARGEST_UNIT,
    MASK,
    MULTIPLIERS,
    ROUNDS,
    UNIT,
    Stream,
    split_seed,
)

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_M0, _M1 = MULTIPLIERS


@dataclass(frozen=True, slots=True)
class StreamRows:
    """Seed, stream, base and position of each row of a batch."""

    words: Tensor  # [5, N, 1] int64: low and high key, position, base, stream

    @classmethod
    def of(
        cls,
        seeds: Sequence[int],
        stream: Stream | Sequence[Stream],
        bases: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> StreamRows:
        """Build rows from plain numbers; one stream for all, or one for each."""
        streams = [stream] * len(seeds) if isinstance(stream, Stream) else stream
        keys = [split_seed(seed) for seed in seeds]
        words = [[low for low, _ in keys], [high for _, high in keys], list(positions), list(bases), list(streams)]
        return cls(torch.tensor(words, dtype=torch.int64, device=device).unsqueeze(-1))

    @property
    def on_host(self) -> bool:
        """True if numpy can do the computation."""
        return self.words.device.type == "cpu"

    def __len__(self) -> int:
        return self.words.shape[1]


def philox4x32(blocks: Tensor, rows: StreamRows) -> Words:  # [N or 1, any] int64 -> four of [N, any]
    """Ten rounds on the counters (block, position, base, stream), by tensor arithmetic."""
    k0, k1, c1, c2, c3 = rows.words
    c0 = blocks
    for turn in range(ROUNDS):
        step0, step1 = (turn * step & MASK for step in KEY_STEPS)
        product0 = (c0 & MASK) * _M0
        product1 = (c2 & MASK) * _M1
        # High halves of these words are garbage until a mask; carries never run down, so the low halves are right.
        c0 = (product1 >> 32) ^ (c1 ^ (k0 + step0))
        c2 = (product0 >> 32) ^ (c3 ^ (k1 + step1))
        c1, c3 = product1, product0
    return c0 & MASK, c1 & MASK, c2 & MASK, c3 & MASK


def row_bits(rows: StreamRows, num_tokens: int) -> Tensor:  # [N, V] int64
    """32 random bits for every token below ``num_tokens``; each Philox block is computed once for its four lanes."""
    if rows.on_host:
        return torch.from_numpy(_host_row_bits(rows, num_tokens).astype(np.int64))
    num_blocks = -(-num_tokens // LANES)
    blocks = torch.arange(num_blocks, dtype=torch.int64, device=rows.words.device).unsqueeze(0)
    lanes = torch.stack(philox4x32(blocks, rows), dim=-1)  # [N, V/4, 4]
    return lanes.view(len(rows), num_blocks * LANES)[:, :num_tokens]


def token_bits(rows: StreamRows, token_ids: Tensor) -> Tensor:  # [N, S] int64 -> [N, S] int64
    """32 random bits for the given tokens of each row, equal to those of ``row_bits``."""
    if rows.on_host:
        return torch.from_numpy(_host_token_bits(rows, token_ids).astype(np.int64))
    lanes = torch.stack(philox4x32(token_ids >> 2, rows), dim=-1)  # [N, S, 4]
    return lanes.gather(-1, (token_ids & (LANES - 1)).unsqueeze(-1)).squeeze(-1)


def uniform(bits: Tensor) -> Tensor:  # int64 -> float64
    """Uniforms in [0, 1), exact."""
    return bits.to(torch.float64) * UNIT


def gumbel(bits: Tensor) -> Tensor:  # int64 -> float32
    """Standard Gumbel noise, by the contract's formula."""
    return _gumbel(bits.to(torch.float32))


def row_gumbel(rows: StreamRows, num_tokens: int) -> Tensor:  # [N, V] float32
    """Gumbel noise for every token below ``num_tokens``."""
    if rows.on_host:
        return _gumbel(torch.from_numpy(_host_row_bits(rows, num_tokens).astype(np.float32)))
    return gumbel(row_bits(rows, num_tokens))


def token_gumbel(rows: StreamRows, token_ids: Tensor) -> Tensor:  # [N, S] int64 -> [N, S] float32
    """Gumbel noise for the given tokens of each row, equal to that of ``row_gumbel``."""
    if rows.on_host:
        return _gumbel(torch.from_numpy(_host_token_bits(rows, token_ids).astype(np.float32)))
    return gumbel(token_bits(rows, token_ids))


def _gumbel(words: Tensor) -> Tensor:
    """Gumbel noise in place, from bits rounded to float32."""
    units = words.add_(0.5).mul_(UNIT).clamp_(max=LARGEST_UNIT)
    return units.neg_().log1p_().neg_().log_().neg_()


def _host_row_bits(rows: StreamRows, num_tokens: int) -> philox_numpy.Bits:
    return philox_numpy.row_bits(_host_words(rows), num_tokens)


def _host_token_bits(rows: StreamRows, token_ids: Tensor) -> philox_numpy.Bits:
    return philox_numpy.token_bits(_host_words(rows), token_ids.numpy())


def _host_words(rows: StreamRows) -> philox_numpy.Words:
    return rows.words.numpy().view(np.uint64)
