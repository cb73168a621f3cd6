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
from outrider.kernels.fp8_linear import Fp8Matrix, Rounding
from outrider.kernels.fp8_linear.rounding import Rounded, rounded
from outrider.kernels.launching import launch_options, shared_bytes
from outrider.kernels.room import empty_rows

BLOCK_K = 128
"""Columns that are summed by themselves; a block's, where scales are of blocks."""
_MOST_INPUT_BYTES = 4
"""Of a number of x."""
_MXFP4_SCALES = (1, 252)
"""Exponents, + 127, whose products with FP4 numbers are normal numbers of bfloat16; others are as good as none."""
_NARROW = 32
"""Pairs of a tile up to which products are bound by the weight's bytes."""
_MXFP4_BLOCK_K = 64
"""Where 128 columns do not divide K."""


@triton.jit
def _load(rows, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of rows [M, 1] of pointers; zeros beyond the last."""
    k = (column + tl.arange(0, BLOCK_K))[None, :]
    if K % BLOCK_K == 0:
        return tl.load(rows + k)
    else:  # noqa: RET505 - of two constants, the compiler sees one branch
        return tl.load(rows + k, mask=k < K, other=0.0)


@triton.jit
def _fp4_bits(code, scale):
    """Bits, as bfloat16, of FP4 numbers (E2M1) times 2 ** (scale - 127), int16; scales are from 1 to 252."""
    exponent, fraction = (code & 7) >> 1, code & 1
    bits = ((scale + exponent - 1) << 7) | tl.where(exponent > 0, fraction << 6, 0)
    return tl.where((code & 7) == 0, 0, bits) | ((code & 8) << 12)


@triton.jit
def _load_mxfp4(rows, scales, column, K: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Columns of rows [M, 1] of pointers to packed numbers, and of their scales, widened; zeros beyond the last."""
    GROUPS: tl.constexpr = BLOCK_K // 32
    group = (column // 32 + tl.arange(0, GROUPS))[None, :]
    places = rows[:, :, None] + group[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    if K % BLOCK_K == 0:
        packed, scale = tl.load(places), tl.load(scales + group)
    else:
        packed = tl.load(places, mask=group[:, :, None] < K // 32, other=0)
        scale = tl.load(scales + group, mask=group < K // 32, other=127)
    packed, scale = packed.to(tl.int16), scale.to(tl.int16)[:, :, None]
    bits = tl.join(_fp4_bits(packed & 15, scale), _fp4_bits(packed >> 4, scale))  # [M, G, 16, 2]
    return tl.reshape(bits, [rows.shape[0], BLOCK_K]).to(tl.bfloat16, bitcast=True).to(DTYPE)


@triton.jit
def _sum_columns(
    x_rows, weight_rows, x_scales, num_rows, weight_scales,
    K: tl.constexpr, X_GROUPS: tl.constexpr, WEIGHT_GROUPS: tl.constexpr, IS_ROUNDED: tl.constexpr,
    IS_MXFP4: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product of a tile [BLOCK_N, WIDTH], times the scales of groups of columns."""
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for column in range(0, K, BLOCK_K):
        x = _load(x_rows, column, K, BLOCK_K)
        if IS_MXFP4:
            weight = _load_mxfp4(weight_rows, weight_scales, column, K, BLOCK_K, x.dtype)
        else:
            weight = _load(weight_rows, column, K, BLOCK_K)
        if not IS_ROUNDED:
            weight = weight.to(x.dtype)
        if WEIGHT_GROUPS <= 1 and X_GROUPS <= 1:
            total = tl.dot(weight, x.T, total, max_num_imprecise_acc=BLOCK_K, input_precision="ieee")
        else:
            product = tl.dot(weight, x.T, input_precision="ieee")
            if WEIGHT_GROUPS > 1:
                product *= tl.load(weight_scales + column // BLOCK_K)[:, None]
            if X_GROUPS > 1:
                product *= tl.load(x_scales + column // BLOCK_K * num_rows)[None, :]
            total += product
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_kernel(
    x_ptr,  # [R, K], R = T or P
    expert_weight_ptr,  # [E * N, K]; of MXFP4 [E * N, K / 2] uint8
    x_scales_ptr,  # [X_GROUPS, R] float32
    weight_scales_ptr,  # [E * N / SCALE_ROWS, WEIGHT_GROUPS] float32; of MXFP4 [E * N, K / 32] uint8
    bias_ptr,  # [E * N]
    order_ptr,  # [P] int32
    tiles_ptr,  # [M, 3] int32
    shares_ptr,  # [P] float32
    out_ptr,  # [P, N]
    num_rows,
    size,  # N
    K: tl.constexpr,
    X_GROUPS: tl.constexpr,  # 0: no scales
    WEIGHT_GROUPS: tl.constexpr,  # 0: no scales
    SCALE_ROWS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tiles_ptr + tl.program_id(0) * 3
    count = tl.load(tile + 2)
    if count > 0:
        expert, first = tl.load(tile), tl.load(tile + 1)
        t = tl.arange(0, WIDTH)
        is_pair = t < count
        pair = tl.load(order_ptr + first + t, mask=is_pair, other=0)
        x_row = pair % num_rows
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = n < size
        row = tl.where(is_row, expert * size + n, 0)
        scale_row = row // SCALE_ROWS * WEIGHT_GROUPS
        x_rows = x_ptr + x_row.to(tl.int64)[:, None] * K
        weight_rows = expert_weight_ptr + row.to(tl.int64)[:, None] * (K // 2 if IS_MXFP4 else K)
        x_scales = x_scales_ptr + x_row
        if IS_MXFP4:
            weight_scales = weight_scales_ptr + row.to(tl.int64)[:, None] * (K // 32)
        else:
            weight_scales = weight_scales_ptr + scale_row
        total = _sum_columns(
            x_rows, weight_rows, x_scales, num_rows, weight_scales,
            K, X_GROUPS, WEIGHT_GROUPS, IS_ROUNDED, IS_MXFP4, WIDTH, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if WEIGHT_GROUPS == 1:
            total *= tl.load(weight_scales_ptr + scale_row)[:, None]
        if X_GROUPS == 1:
            total *= tl.load(x_scales_ptr + x_row)[None, :]
        if HAS_BIAS:
            total += tl.load(bias_ptr + expert * size + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if IS_WEIGHTED:
            total *= tl.load(shares_ptr + pair)[None, :]
        place = pair.to(tl.int64)[:, None] * size + n[None, :]
        inside = is_pair[:, None] & is_row[None, :]
        tl.store(out_ptr + place, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes; they do not change a bit."""

    width: int
    """Pairs."""
    block_n: int
    num_warps: int
    num_stages: int


_TILINGS = (
    (8, Tiling(16, 128, 4, 4)),
    (24, Tiling(32, 128, 8, 4)),
    (48, Tiling(64, 128, 8, 3)),
    (1 << 62, Tiling(128, 128, 8, 3)),
)
"""(most pairs of an expert on average, tiling), found with experts of 2048 x 768 on an H100."""


def tiling_of(num_pairs: int, num_experts: int) -> Tiling:
    """Tiling for a number of pairs."""
    return next(tiling for most, tiling in _TILINGS if num_pairs <= most * num_experts)


class TritonExperts(ExpertWeight):
    """Weights of all experts, plain, or FP8 or FP4 numbers with scales."""

    def __init__(
        self, weight: torch.Tensor | Fp8Matrix | Mxfp4Matrix, num_experts: int, rounding: Rounding | None = None
    ) -> None:
        """Of FP8 numbers inputs are rounded as the ``rounding`` says; plain weights have none."""
        self._rounding, self._num_experts = rounding or Rounding(None), num_experts
        self._scales, self._scale_rows = None, 1
        if isinstance(weight, Fp8Matrix):
            self._scales, self._scale_rows = weight.scales, weight.rows
            if self._rounding.scale is not None:  # one scale for all inputs: they have none of their own
                self._scales = weight.scales * self._rounding.scale
            weight = weight.numbers
        self._is_mxfp4 = isinstance(weight, Mxfp4Matrix)
        if isinstance(weight, Mxfp4Matrix):
            self._scales = weight.scales.clamp(*_MXFP4_SCALES).contiguous()
            weight = weight.numbers
        self._weight = weight.contiguous()  # [E * N, K], or packed [E * N, K / 2]

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
            self._launch(rounded(x, self._rounding), routing, bias, out, is_weighted=is_weighted)
        return out

    def _launch(
        self, x: Rounded, routing: Routing, bias: torch.Tensor | None, out: torch.Tensor, *, is_weighted: bool
    ) -> None:
        tiles = routing.tiles
        if tiles is None:
            raise ValueError("the routing is not one of kernels")
        num_pairs, weight, unused = routing.weights.numel(), self._weight, routing.weights
        tiling, size = tiling_of(num_pairs, self._num_experts), out.shape[-1]
        scales, columns, is_mxfp4 = self._scales, x.numbers.shape[1], self._is_mxfp4
        _grouped_kernel[(tiles.tiles.shape[0], triton.cdiv(size, tiling.block_n))](
            x.numbers, weight, unused if x.scales is None else x.scales, unused if scales is None else scales,
            unused if bias is None else bias, tiles.order, tiles.tiles, routing.weights, out,
            x.numbers.shape[0], size, K=columns, X_GROUPS=0 if x.scales is None else x.scales.shape[0],
            WEIGHT_GROUPS=0 if scales is None or is_mxfp4 else scales.shape[1], SCALE_ROWS=self._scale_rows,
            IS_ROUNDED=is_mxfp4 or x.numbers.dtype == weight.dtype, IS_MXFP4=is_mxfp4, HAS_BIAS=bias is not None,
            IS_WEIGHTED=is_weighted, WIDTH=tiles.width, BLOCK_N=tiling.block_n,
            BLOCK_K=BLOCK_K if columns % BLOCK_K == 0 or not is_mxfp4 else _MXFP4_BLOCK_K,
            num_warps=tiling.num_warps, num_stages=self._stages(tiling), **launch_options(out),
        )  # fmt: skip

    def _stages(self, tiling: Tiling) -> int:
        """Tiles that are loaded ahead, as many as shared memory holds."""
        tile_bytes = BLOCK_K * (tiling.block_n * self._weight.dtype.itemsize + tiling.width * _MOST_INPUT_BYTES)
        # MXFP4 tiles have a quarter of the bytes: as many are on their way.
        wanted = 2 * tiling.num_stages if self._is_mxfp4 and tiling.width <= _NARROW else tiling.num_stages
        return max(1, min(wanted, shared_bytes(self._weight.device) // tile_bytes))
