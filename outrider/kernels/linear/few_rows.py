"""Prepared 16-bit weight on a GPU, with a kernel for each range of numbers of rows.

``few_tokens`` computes one row, ``skinny`` up to sixteen, ``split_k`` and ``stream_k`` six to 256 where they were
measured to be faster in whole forwards, and cuBLAS the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from outrider.kernels.few_tokens import MAX_TOKENS, Matrix, suits
from outrider.kernels.few_tokens.kernel import product
from outrider.kernels.launching import launches_early, num_processors, shared_bytes
from outrider.kernels.linear import split_k, stream_k
from outrider.kernels.linear.contract import PreparedWeight
from outrider.kernels.linear.skinny import Tiling, skinny_product

_MOST_ROWS = 16
_BLOCK_N = 64
_ALIGNED_BYTES = 16
"""Alignment that TMA requires of a matrix and of its rows."""
_WIDTHS = ((16, 0), (32, 0), (64, 0), (64, 16), (128, 0), (128, 32))
"""Numbers of rows in the two parts of a program of ``split_k``, which match the shapes that are captured."""
_FEWEST_ROWS = 6
_SPLITS = (2, 4)
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
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=weight.device)

    @property
    def matrix(self) -> torch.Tensor | None:
        """The weight [N, K], if it suits ``few_tokens``."""
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
        return F.linear(x, self._weight, bias)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 partials [A, T, N] whose sum over A is the product."""
        if bias is None and (tiling := self._split(x.shape[0])):
            return split_k.split_k_partials(x, self._weight, tiling)
        if bias is None and (tiling := self._stream_k_tiling(x.shape[0])):
            return stream_k.stream_k_partials(x, self._weight, tiling)
        return self(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to silu(gate) * up [T, N / 2] of the two halves of the product."""
        tiling = gate_tiling(x.shape[0])
        if tiling is None or not self._can_tma:
            return super().gated(x, bias)
        return split_k.gated_product(x, self._weight, bias, tiling)

    def _split(self, num_tokens: int) -> split_k.Tiling | None:
        return None if self._splits is None else split_tiling(num_tokens, self._splits)

    def _stream_k_tiling(self, num_tokens: int) -> split_k.Tiling | None:
        tiling = stream_k_tiling(num_tokens) if self._has_stream_k else None
        return tiling if tiling is not None and stream_k.can_stream_k(self._weight, tiling) else None


def pays(weight: torch.Tensor) -> bool:
    """Whether these kernels are faster than cuBLAS for products of a few rows with ``weight`` [N, K]."""
    may_fetch_ahead = launches_early(weight.device) or weight.device.type == "cpu"  # where it is but tested
    return may_fetch_ahead and weight.dtype.itemsize == 2 and weight.is_contiguous()


def can_tma(weight: torch.Tensor) -> bool:
    """Whether TMA can load tiles of ``weight`` [N, K] and of its activations."""
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    return weight.data_ptr() % _ALIGNED_BYTES == 0 and row_bytes % _ALIGNED_BYTES == 0


def choose_tiling(out_features: int, num_processors: int) -> Tiling:
    """Tiling of ``skinny``: K is split where that gives nearly every multiprocessor one part.

    The numbers were measured in whole forwards of 1B and 8B shapes on an H200.
    """
    tiles = triton.cdiv(out_features, _BLOCK_N)
    if _nearly_all(4 * tiles, num_processors):
        return Tiling(_BLOCK_N, 128, 4, 4, 4, 512)
    if _nearly_all(2 * tiles, num_processors):
        return Tiling(_BLOCK_N, 256, 2, 4, 3, 0)
    return Tiling(_BLOCK_N, 128, 1, 4, 5, 256)


def num_splits(out_features: int, num_processors: int) -> int | None:
    """Number of parts into which ``split_k`` divides K; None if cuBLAS is faster.

    It was measured to be faster where no number gives nearly every multiprocessor one part.
    """
    tiles = triton.cdiv(out_features, _BLOCK_N)
    return next((splits for splits in _SPLITS if _nearly_all(splits * tiles, num_processors)), None)


def fills_with_stream_k(out_features: int, num_processors: int) -> bool:
    """Whether stream-K, with four programs for three tiles, gives nearly every multiprocessor one program."""
    return out_features % (3 * _BLOCK_N) == 0 and _nearly_all(out_features // _BLOCK_N // 3 * 4, num_processors)


def split_tiling(num_tokens: int, splits: int) -> split_k.Tiling | None:
    """Tiling of ``split_k`` for so many rows; None if another kernel is faster.

    A program uses so much shared memory that no two share a multiprocessor: programs that are launched early would
    otherwise gather where the kernel before them ended first.
    """
    if splits == min(_SPLITS) and 160 < num_tokens <= 192:
        return split_k.Tiling(128, 64, _BLOCK_N, 64, splits, 4, 6, 128)
    if splits == min(_SPLITS) and 192 < num_tokens <= 256:  # two groups of tokens share a tile
        return split_k.Tiling(128, 0, 2 * _BLOCK_N, 64, splits, 4, 6, 128)
    match _widths(num_tokens):
        case (16, rest):
            return split_k.Tiling(16, rest, _BLOCK_N, 128, splits, 4, 6, 512)
        case (32, rest):
            return split_k.Tiling(32, rest, _BLOCK_N, 128, splits, 4, 6, 128)
        case (64, 0) if splits == min(_SPLITS):  # of more, each is over before it is that deep
            return split_k.Tiling(64, 0, _BLOCK_N, 128, splits, 4, 6, 128)
        case (64 | 128 as width, rest) if width + rest <= 128:
            return split_k.Tiling(width, rest, _BLOCK_N, 128, splits, 4, 4, 128)
        case (128, rest):
            return split_k.Tiling(128, rest, _BLOCK_N, 64, splits, 4, 7, 128)
    return None


def stream_k_tiling(num_tokens: int) -> split_k.Tiling | None:
    """Tiling of ``stream_k`` for so many rows; None if another kernel is faster."""
    match _widths(num_tokens):
        case (16, rest):
            return split_k.Tiling(16, rest, _BLOCK_N, 128, 1, 4, 10, 128)
        case (32 | 64 as width, rest):
            return split_k.Tiling(width, rest, _BLOCK_N, 128, 1, 4, 6, 128)
        case (128, 0):
            return split_k.Tiling(128, 0, _BLOCK_N, 128, 1, 4, 4, 128)
    return None


def gate_tiling(num_tokens: int) -> split_k.Tiling | None:
    """Tiling of ``gated_product`` for so many rows; None if another kernel is faster."""
    if 240 < num_tokens <= 256:
        return split_k.Tiling(256, 0, _BLOCK_N, 64, 1, 8, 4, 0)
    match _widths(num_tokens):
        case (16, rest):
            return split_k.Tiling(16, rest, _BLOCK_N, 128, 1, 4, 5, 256)
        case (32 | 64 as width, rest):
            return split_k.Tiling(width, rest, _BLOCK_N, 128, 1, 4, 4, 0)
        case (128, 0):
            return split_k.Tiling(128, 0, _BLOCK_N, 64, 1, 4, 3, 0)
    return None


def _widths(num_tokens: int) -> tuple[int, int] | None:
    """Narrowest of ``_WIDTHS`` that holds so many rows; None if they are too few or too many."""
    if num_tokens < _FEWEST_ROWS:
        return None
    return next(((width, rest) for width, rest in _WIDTHS if num_tokens <= width + rest), None)


def _nearly_all(num_programs: int, num_processors: int) -> bool:
    return 0.9 * num_processors <= num_programs <= num_processors
