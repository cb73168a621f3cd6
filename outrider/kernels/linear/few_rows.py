"""Prepared 16-bit weight on a GPU, with a kernel for each range of numbers of rows.

``gemv`` computes one row, ``skinny`` up to sixteen, ``split_k`` and ``stream_k`` six to 256 where they were
measured to be faster in whole forwards, and cuBLAS the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from outrider.kernels.gemv import MAX_TOKENS, Matrix, suits
from outrider.kernels.gemv.kernel import product
from outrider.kernels.launching import launches_early, num_processors, shared_bytes
from outrider.kernels.linear import selection, split_k, stream_k
from outrider.kernels.linear.reference import PreparedWeight
from outrider.kernels.linear.skinny import SkinnyTiling, skinny_product
from outrider.kernels.room import with_room

_MOST_ROWS = 16
_BLOCK_N = 64
_MOST_UNEVEN_ROWS = 64
"""Rows up to which a gated product is bound by bytes, so that a last round of few tiles costs little."""
_ALIGNED_BYTES = 16
"""Alignment that TMA requires of a matrix and of its rows."""
_SHARED_BYTES = 227 << 10
"""Shared memory of one program with the deepest tilings."""


class FewRowsWeight(PreparedWeight):
    """The weight, and the counters that its products share."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [N, K]
        self._suits = suits(weight)
        processors = num_processors(weight.device)
        self._tiling = choose_tiling(weight.shape[0], processors)
        self._can_tma = can_tma(weight) and shared_bytes(weight.device) >= _SHARED_BYTES
        self._splits = num_splits(weight.shape[0], processors) if self._can_tma else None
        self._has_stream_k = self._can_tma and fills_with_stream_k(weight.shape[0], processors)
        tiles = triton.cdiv(weight.shape[0], self._tiling.block_n)
        self._gate_tiles_fill = not wastes_gate_tiles(weight.shape[0] // 2, processors)
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=weight.device)

    @property
    def matrix(self) -> torch.Tensor | None:
        """The weight [N, K], if it suits ``gemv``."""
        return self._weight if self._suits else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        num_tokens = x.shape[0]
        if self._suits and 0 < num_tokens <= MAX_TOKENS:
            return product(x, Matrix(self._weight, bias))
        if 0 < num_tokens <= _MOST_ROWS:
            return skinny_product(x, self._weight, bias, self._counters, self._tiling)
        if tiling := self._split(num_tokens):
            return split_k.sum_partials(split_k.split_k_partials(x, self._weight, tiling), bias, x.dtype)
        more = selection.library_rows(num_tokens) if self._has_stream_k else num_tokens
        return F.linear(with_room(x, more), self._weight, bias)[:num_tokens]

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 partials [A, T, N] whose sum over A is the product."""
        if bias is None and (tiling := self._split(x.shape[0])):
            return split_k.split_k_partials(x, self._weight, tiling)
        if bias is None and (tiling := self._stream_k_tiling(x.shape[0])):
            return stream_k.stream_k_partials(x, self._weight, tiling)
        return self(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to silu(gate) * up [T, N / 2] of the two halves of the product."""
        tiling = selection.gate_tiling(x.shape[0])
        if tiling is None or not self._can_tma or (x.shape[0] > _MOST_UNEVEN_ROWS and not self._gate_tiles_fill):
            return super().gated(x, bias)
        return split_k.gated_product(x, self._weight, bias, tiling)

    def _split(self, num_tokens: int) -> selection.Tiling | None:
        return None if self._splits is None else selection.split_tiling(num_tokens, self._splits)

    def _stream_k_tiling(self, num_tokens: int) -> selection.Tiling | None:
        tiling = selection.stream_k_tiling(num_tokens) if self._has_stream_k else None
        return tiling if tiling is not None and stream_k.can_stream_k(self._weight, tiling) else None


def pays(weight: torch.Tensor) -> bool:
    """True if these kernels are faster than cuBLAS for products of a few rows with ``weight`` [N, K]."""
    may_fetch_ahead = launches_early(weight.device) or weight.device.type == "cpu"  # where it is but tested
    return may_fetch_ahead and weight.dtype.itemsize == 2 and weight.is_contiguous()


def can_tma(weight: torch.Tensor) -> bool:
    """True if TMA can load tiles of ``weight`` [N, K] and of its activations."""
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    return weight.data_ptr() % _ALIGNED_BYTES == 0 and row_bytes % _ALIGNED_BYTES == 0


def choose_tiling(out_features: int, num_processors: int) -> SkinnyTiling:
    """Tiling of ``skinny``: K is split where that gives nearly every multiprocessor one part.

    The numbers were measured in whole forwards of 1B and 8B shapes on an H200.
    """
    tiles = triton.cdiv(out_features, _BLOCK_N)
    if _nearly_all(4 * tiles, num_processors):
        return SkinnyTiling(_BLOCK_N, 128, 4, 4, 4, 512)
    if _nearly_all(2 * tiles, num_processors):
        return SkinnyTiling(_BLOCK_N, 256, 2, 4, 3, 0)
    return SkinnyTiling(_BLOCK_N, 128, 1, 4, 5, 256)


def num_splits(out_features: int, num_processors: int) -> int | None:
    """Number of parts into which ``split_k`` divides K; None if cuBLAS is faster.

    It was measured to be faster where no number gives nearly every multiprocessor one part.
    """
    tiles = triton.cdiv(out_features, _BLOCK_N)
    return next((splits for splits in selection.SPLITS if _nearly_all(splits * tiles, num_processors)), None)


def fills_with_stream_k(out_features: int, num_processors: int) -> bool:
    """True if stream-K, with four programs for three tiles, gives nearly every multiprocessor one program."""
    return out_features % (3 * _BLOCK_N) == 0 and _nearly_all(out_features // _BLOCK_N // 3 * 4, num_processors)


def wastes_gate_tiles(out_features: int, num_processors: int) -> bool:
    """True if the tiles of a gated product of N ``out_features`` take several rounds, the last of them nearly empty:
    17,408 of a 27B, of which 128 rows took 122 us on an H200, 93 by cuBLAS.
    """
    tiles = triton.cdiv(out_features, _BLOCK_N)
    return bool(num_processors < tiles < 0.7 * num_processors * triton.cdiv(tiles, num_processors))


def _nearly_all(num_programs: int, num_processors: int) -> bool:
    return 0.9 * num_processors <= num_programs <= num_processors
