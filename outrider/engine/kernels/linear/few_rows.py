"""A weight on a GPU that is often multiplied with a few rows: ``few_tokens`` for one, ``skinny`` for up to sixteen,
cuBLAS for many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from outrider.engine.kernels.few_tokens import MAX_TOKENS, Matrix, suits
from outrider.engine.kernels.few_tokens.kernel import product
from outrider.engine.kernels.launching import launches_early, num_processors
from outrider.engine.kernels.linear.skinny import Tiling, skinny_product

_MOST_ROWS = 16
_BLOCK_N = 64


class FewRowsWeight:
    """The weight as it is, and the counters that products of it share."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [N, K]
        self._suits = suits(weight)
        self._tiling = choose_tiling(weight.shape[0], num_processors(weight.device))
        tiles = triton.cdiv(weight.shape[0], self._tiling.block_n)
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=weight.device)

    @property
    def matrix(self) -> torch.Tensor | None:
        """[N, K], where it suits ``few_tokens``."""
        return self._weight if self._suits else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        if self._suits and 0 < x.shape[0] <= MAX_TOKENS:
            return product(x, Matrix(self._weight, bias))
        if 0 < x.shape[0] <= _MOST_ROWS:
            return skinny_product(x, self._weight, bias, self._counters, self._tiling)
        return F.linear(x, self._weight, bias)


def pays(weight: torch.Tensor) -> bool:
    """Whether products of a few rows with ``weight`` [N, K] are faster so than through cuBLAS."""
    may_fetch_ahead = launches_early(weight.device) or weight.device.type == "cpu"  # where it is but tested
    return may_fetch_ahead and weight.dtype.itemsize == 2 and weight.is_contiguous()


def choose_tiling(out_features: int, num_processors: int) -> Tiling:
    """The sum over K is split where that gives nearly every multiprocessor one part; found best by trying, in whole
    forwards of 1B and 8B shapes on an H200.
    """
    tiles = triton.cdiv(out_features, _BLOCK_N)
    if _nearly_all(4 * tiles, num_processors):
        return Tiling(_BLOCK_N, 128, 4, 4, 4, 512)
    if _nearly_all(2 * tiles, num_processors):
        return Tiling(_BLOCK_N, 256, 2, 4, 3, 0)
    return Tiling(_BLOCK_N, 128, 1, 4, 5, 256)


def _nearly_all(num_programs: int, num_processors: int) -> bool:
    return 0.9 * num_processors <= num_programs <= num_processors
