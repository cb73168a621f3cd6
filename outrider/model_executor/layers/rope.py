"""Rotary position embeddings: cos and sin of every position, for each way of stretching them.

Owns inverse frequencies, their scaling and, on a GPU, a table over all positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.rope_and_cache import CosSin

if TYPE_CHECKING:
    from outrider.model_executor.models.config import RopeConfig


class RotaryEmbedding:
    """Cosines and signed sines of positions."""

    def __init__(self, rope: RopeConfig, *, head_dim: int, max_position: int, device: torch.device) -> None:
        self._rope = rope
        self._head_dim = head_dim
        size = rotated_size(rope, head_dim)
        self._size = size
        self._max_position = max_position
        self._table: CosSin | None = None
        if device.type == "meta":  # a model whose shapes alone are read; sums there import torch._dynamo, for 2 s
            device = torch.device("cpu")
        self._exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size  # [R/2]
        self._unstretched_length = max_position / rope.factor if rope.rope_type == "dynamic" else 0.0
        frequencies = _SCALINGS[rope.rope_type](rope, 1.0 / rope.theta**self._exponents, size)
        self._inverse_frequencies = self._of_head(frequencies)  # [D], both halves alike
        self._signs = torch.tensor([-1.0, 1.0], device=device).repeat_interleave(head_dim // 2)  # [D]
        self._scale = _FACTORS[rope.rope_type](rope) if rope.rope_type in _FACTORS else 1.0

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> CosSin:
        """Cos and sin of tokens at ``positions`` [T].

        On a CPU they are worked out. On a GPU a forward only points into a table of all positions, which the first
        makes.
        """
        if not has_kernels(positions.device):
            return self._work_out(positions, dtype)
        if self._table is None or self._table.cos.dtype != dtype:
            self._table = self._work_out(torch.arange(self._max_position, device=positions.device), dtype)
        return CosSin(self._table.cos, self._table.sin, positions)

    def _work_out(self, positions: torch.Tensor, dtype: torch.dtype) -> CosSin:
        angles = positions.float().view(-1, 1, 1) * self._frequencies_at(positions)  # [T, 1, D]
        cos, sin = angles.cos(), angles.sin().mul_(self._signs)
        if self._scale != 1.0:
            for half in (slice(0, self._size // 2), slice(self._head_dim // 2, (self._head_dim + self._size) // 2)):
                cos[..., half].mul_(self._scale)
                sin[..., half].mul_(self._scale)
        return CosSin(cos.to(dtype), sin.to(dtype))

    def _frequencies_at(self, positions: torch.Tensor) -> torch.Tensor:
        if self._rope.rope_type != "dynamic":
            return self._inverse_frequencies
        # The base grows with the length at which a position is the last. Taken position by position, so that a token's
        # key is the same whatever it was computed together with: a rollback or another chunking must not change the
        # text.
        lengths = (positions + 1).clamp(min=self._unstretched_length).double().view(-1, 1, 1)
        stretch = self._rope.factor * lengths / self._unstretched_length - (self._rope.factor - 1)
        base = self._rope.theta * stretch ** (self._size / (self._size - 2))
        return self._of_head((1.0 / base**self._exponents).float())  # [T, 1, D]

    def _of_head(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Frequencies [..., R/2] of both halves of a head [..., D]; features that are not rotated have frequency 0."""
        half = torch.nn.functional.pad(frequencies, (0, (self._head_dim - self._size) // 2))
        return torch.cat((half, half), dim=-1)


def rotated_size(rope: RopeConfig, head_dim: int) -> int:
    """Features of a head that are rotated, R."""
    return head_dim if rope.rope_type == "proportional" else int(head_dim * rope.partial)


def head_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...]:
    """Order of a head's features in which each is rotated with that half a head away; empty: their own.

    Scores do not depend on the order, as long as queries and keys have the same one.
    """
    size = rotated_size(rope, head_dim)
    if size == head_dim and not rope.is_interleaved:
        return ()
    firsts, seconds = range(size // 2), range(size // 2, size)
    if rope.is_interleaved:
        firsts, seconds = range(0, size, 2), range(1, size, 2)
    middle = (size + head_dim) // 2
    return (*firsts, *range(size, middle), *seconds, *range(middle, head_dim))


def _unscaled(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    return frequencies


def _linear(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    return frequencies / rope.factor


def _proportional(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The first share of the frequencies is that of a whole head, the others are 0."""
    frequencies[int(rope.partial * head_dim // 2) :] = 0.0
    return frequencies / rope.factor


def _longrope(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Each frequency has divisors of its own, for short texts and for long ones (Ding et al., 2024)."""
    factors = rope.long_factor if rope.is_long else rope.short_factor
    return frequencies / torch.tensor(factors, dtype=frequencies.dtype, device=frequencies.device)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    rotations = rope.original_max_position * frequencies / (2 * math.pi)  # [D/2] turns within the trained length
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN frequencies: as llama3, but the blend is linear in the dimension and its ends are where a wave turns
    ``beta`` times.
    """
    low, high = (_yarn_dimension(rope, beta, head_dim) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    dimensions = torch.arange(head_dim // 2, device=frequencies.device, dtype=torch.float32)
    stretched = ((dimensions - low) / width).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_dimension(rope: RopeConfig, rotations: float, head_dim: int) -> float:
    """The dimension whose wave turns this many times within the trained length."""
    wavelengths = rope.original_max_position / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


_SCALINGS = {
    "default": _unscaled, "dynamic": _unscaled, "linear": _linear, "llama3": _llama3, "longrope": _longrope,
    "proportional": _proportional, "yarn": _yarn,
}  # fmt: skip
_FACTORS = {"longrope": _longrope_factor, "yarn": _attention_factor}
"""Factors of cosines and sines."""
