# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Grouped products (grouped GEMM) on a GPU: pairs of tokens and experts by the weights of their experts.

A program multiplies rows of one expert's weight with the inputs of one tile of pairs. The weight's rows are the rows of
the matrix unit's tile, the pairs its columns; K is not divided. So a pair's result has the same bits in any tile and
with any other pairs. Tiles of one expert are neighbours, so that its weight is read from memory once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.experts.layout import ExpertWeight, Mxfp4Matrix, Routing
from outrider.kernels.experts.mxfp4 import packed, sum_mxfp4_columns
from outrider.kernels.experts.reference import of_experts
from outrider.kernels.fp8_linear import FP8, FP8_MAX, Fp8Matrix, Rounding
from outrider.kernels.fp8_linear.layout import Rounded
from outrider.kernels.fp8_linear.rounding import rounded
from outrider.kernels.launching import launch_options, stages_within
from outrider.kernels.room import empty_rows

BLOCK_K = 128
"""Columns that are summed by themselves; a block's, where scales are of blocks."""
_MOST_INPUT_BYTES = 4
"""Largest size of a number of x."""


@triton.jit
def _load(rows, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of rows [M, 1] of pointers; zeros beyond the last."""
    k = (column + tl.arange(0, BLOCK_K))[None, :]
    if K % BLOCK_K == 0:
        return tl.load(rows + k)
    else:  # noqa: RET505 - of two constants, the compiler sees one branch
        return tl.load(rows + k, mask=k < K, other=0.0)


@triton.jit
def _sum_columns(
    x_rows, weight_rows, x_scales_ptr, x_row, scale_stride, weight_scales_ptr, scale_row,
    K: tl.constexpr, X_GROUPS: tl.constexpr, WEIGHT_GROUPS: tl.constexpr, IS_ROUNDED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product of a tile [BLOCK_N, WIDTH], times its scales."""
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for column in range(0, K, BLOCK_K):
        x = _load(x_rows, column, K, BLOCK_K)
        weight = _load(weight_rows, column, K, BLOCK_K)
        if not IS_ROUNDED:
            weight = weight.to(x.dtype)
        if WEIGHT_GROUPS <= 1 and X_GROUPS <= 1:
            total = tl.dot(weight, x.T, total, max_num_imprecise_acc=BLOCK_K, input_precision="ieee")
        else:
            product = tl.dot(weight, x.T, input_precision="ieee")
            if WEIGHT_GROUPS > 1:
                product *= tl.load(weight_scales_ptr + scale_row + column // BLOCK_K)[:, None]
            if X_GROUPS > 1:
                product *= tl.load(x_scales_ptr + x_row + column // BLOCK_K * scale_stride)[None, :]
            total += product
    if WEIGHT_GROUPS == 1:
        total *= tl.load(weight_scales_ptr + scale_row)[:, None]
    if X_GROUPS == 1:
        total *= tl.load(x_scales_ptr + x_row)[None, :]
    return total


@triton.jit
def _store_pairs(out_ptr, total, pair, n, is_pair, is_row, size):
    """Store a tile [BLOCK_N, WIDTH] in the rows of its pairs."""
    place = pair.to(tl.int64)[:, None] * size + n[None, :]
    inside = is_pair[:, None] & is_row[None, :]
    tl.store(out_ptr + place, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _grouped_kernel(
    x_ptr,  # [R, K], R = T or P
    expert_weight_ptr,  # [E * N, K]; of MXFP4 words [E * N, K / 4] int16
    x_scales_ptr,  # [X_GROUPS, R or more] float32
    weight_scales_ptr,  # [E * N / SCALE_ROWS, WEIGHT_GROUPS] float32; of MXFP4 [K / 128, E * N] int32
    bias_ptr,  # [E * N]
    order_ptr,  # [P] int32
    tiles_ptr,  # [M, 3] int32
    shares_ptr,  # [P] float32
    out_ptr,  # [P, N]
    num_rows,
    scale_stride,
    size,  # N
    num_weight_rows,  # E * N
    K: tl.constexpr,
    X_GROUPS: tl.constexpr,  # 0: no scales
    WEIGHT_GROUPS: tl.constexpr,  # 0: no scales
    SCALE_ROWS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    IS_FAST: tl.constexpr,  # MXFP4 numbers are widened by instructions of a GPU to bfloat16
    HAS_BIAS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share a tile of pairs
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, before = tiles_ptr + tl.program_id(0) // PARTS * 3, tl.program_id(0) % PARTS * WIDTH
    count = tl.load(tile + 2) - before
    if count > 0:
        expert, first = tl.load(tile), tl.load(tile + 1) + before
        t = tl.arange(0, WIDTH)
        is_pair = t < count
        pair = tl.load(order_ptr + first + t, mask=is_pair, other=0)
        x_row = pair % num_rows
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = n < size
        row = tl.where(is_row, expert * size + n, 0)
        scale_row = row // SCALE_ROWS * WEIGHT_GROUPS
        x_rows = x_ptr + x_row.to(tl.int64)[:, None] * K
        if IS_MXFP4:
            words = expert_weight_ptr + row.to(tl.int64)[:, None] * ((K + 127) // 128 * 32)
            total = sum_mxfp4_columns(
                x_rows, words, weight_scales_ptr + row, num_weight_rows, K, WIDTH, BLOCK_N, IS_FAST
            )  # fmt: skip
        else:
            total = _sum_columns(
                x_rows, expert_weight_ptr + row.to(tl.int64)[:, None] * K, x_scales_ptr, x_row, scale_stride,
                weight_scales_ptr, scale_row, K, X_GROUPS, WEIGHT_GROUPS, IS_ROUNDED, WIDTH, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias_ptr + expert * size + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if IS_WEIGHTED:
            total *= tl.load(shares_ptr + pair)[None, :]
        _store_pairs(out_ptr, total, pair, n, is_pair, is_row, size)


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Tile sizes; they do not change a bit."""

    width: int
    """Pairs."""
    block_n: int
    num_warps: int
    num_stages: int


_TILINGS = (
    (8, ExpertTiling(16, 128, 4, 4)),
    (24, ExpertTiling(32, 128, 8, 4)),
    (48, ExpertTiling(64, 128, 8, 3)),
    (1 << 62, ExpertTiling(128, 128, 8, 3)),
)
"""(most pairs of an expert on average, tiling), found with experts of 2048 x 768 on an H100."""

_MXFP4_TILINGS = {
    16: ExpertTiling(16, 64, 4, 5),
    32: ExpertTiling(32, 128, 8, 4),
    64: ExpertTiling(32, 128, 4, 4),
    128: ExpertTiling(32, 128, 4, 4),
}
"""Tilings of MXFP4 weights by the pairs of a tile, which several programs share; found with experts of 2880 x 2880."""


def tiling_of(num_pairs: int, num_experts: int) -> ExpertTiling:
    """Tiling for a number of pairs."""
    return next(tiling for most, tiling in _TILINGS if num_pairs <= most * num_experts)


class TritonExperts(ExpertWeight):
    """Weights of all experts, plain, or FP8 or FP4 numbers with scales."""

    def __init__(
        self, weight: torch.Tensor | Fp8Matrix | Mxfp4Matrix, num_experts: int, rounding: Rounding | None = None
    ) -> None:
        """Experts over a weight. Inputs of FP8 are rounded as the ``rounding`` says; plain weights have none."""
        self._rounding, self._num_experts = rounding or Rounding(None), num_experts
        self._scales, self._scale_rows = None, 1
        if isinstance(weight, Fp8Matrix):
            self._scales, self._scale_rows = weight.scales, weight.rows
            if self._rounding.scale is not None and not self._rounding.scale.dim():  # inputs have none of their own
                self._scales = weight.scales * self._rounding.scale
            weight = weight.numbers
        self._is_mxfp4 = isinstance(weight, Mxfp4Matrix)
        if isinstance(weight, Mxfp4Matrix):
            weight, self._scales = packed(weight)
        self._weight = weight.contiguous()  # [E * N, K], or packed [E * N, K / 4]

    def __call__(
        self, x: torch.Tensor, routing: Routing, bias: torch.Tensor | None, *, is_weighted: bool = False
    ) -> torch.Tensor:
        """``x`` [T, K] or [P, K] to [P, N], or weighted to float32 [A, T, N]."""
        num_pairs, size = routing.weights.numel(), self._weight.shape[0] // self._num_experts
        if is_weighted:
            make = torch.zeros if routing.is_partial else torch.empty
            out = make(*routing.weights.shape, size, dtype=torch.float32, device=x.device)
        else:
            out = empty_rows(num_pairs, size, dtype=x.dtype, device=x.device)
        if num_pairs:
            self._launch(self._rounded(x, routing), routing, bias, out, is_weighted=is_weighted)
        return out

    def _rounded(self, x: torch.Tensor, routing: Routing) -> Rounded:
        scale = self._rounding.scale
        if scale is None or not scale.dim():
            return rounded(x, self._rounding)
        pairs, scales = of_experts(x, routing, scale)
        numbers = (pairs.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return Rounded(numbers, scales.T)

    def _launch(
        self, x: Rounded, routing: Routing, bias: torch.Tensor | None, out: torch.Tensor, *, is_weighted: bool
    ) -> None:
        tiles = routing.tiles
        if tiles is None:
            raise ValueError("the routing is not one of kernels")
        num_pairs, weight, unused = routing.weights.numel(), self._weight, routing.weights
        tiling, size = tiling_of(num_pairs, self._num_experts), out.shape[-1]
        scales, is_mxfp4 = self._scales, self._is_mxfp4
        if is_mxfp4:
            tiling = _MXFP4_TILINGS[tiles.width]
        width = min(tiling.width, tiles.width)
        parts = tiles.width // width
        _grouped_kernel[(parts * tiles.tiles.shape[0], triton.cdiv(size, tiling.block_n))](
            x.numbers, weight, unused if x.scales is None else x.scales, unused if scales is None else scales,
            unused if bias is None else bias, tiles.order, tiles.tiles, routing.weights, out,
            x.numbers.shape[0], 0 if x.scales is None else x.scales.shape[1], size, weight.shape[0],
            K=x.numbers.shape[1], X_GROUPS=0 if x.scales is None else x.scales.shape[0],
            WEIGHT_GROUPS=0 if scales is None or is_mxfp4 else scales.shape[1], SCALE_ROWS=self._scale_rows,
            IS_ROUNDED=x.numbers.dtype == weight.dtype, IS_MXFP4=is_mxfp4,
            IS_FAST=x.numbers.dtype == torch.bfloat16 and out.device.type == "cuda", HAS_BIAS=bias is not None,
            IS_WEIGHTED=is_weighted, PARTS=parts, WIDTH=width, BLOCK_N=tiling.block_n, BLOCK_K=BLOCK_K,
            num_warps=tiling.num_warps, num_stages=self._stages(tiling),
            # Each tiling would contract sums and the scales of FP8 in its own way; other scales are powers of two.
            enable_fp_fusion=scales is None or is_mxfp4, **launch_options(out),
        )  # fmt: skip

    def _stages(self, tiling: ExpertTiling) -> int:
        """Tiles that are loaded ahead, as many as shared memory holds."""
        row_bytes = BLOCK_K if self._is_mxfp4 else BLOCK_K * self._weight.dtype.itemsize
        tile_bytes = tiling.block_n * row_bytes + BLOCK_K * tiling.width * _MOST_INPUT_BYTES
        return stages_within(tiling.num_stages, tile_bytes, self._weight.device)
