# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""FP8 product on a GPU: one kernel for every number of rows, which the library replaces for many.

The weight's rows are the rows of the matrix unit's tile, the rows of x its columns. The matrix unit sums the columns in
order, in parts of K whose number depends on the weight alone, and the parts are added in order: a row's result is the
same, bit for bit, with any other rows. Where scales are of groups, every 128 columns are summed by themselves. For few
rows each part has a program of its own; for many, one program computes all parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels.fp8_linear.layout import Fp8Matrix, Rounded
from outrider.kernels.launching import launch_options, stages_within
from outrider.kernels.room import with_room

BLOCK_K = 128
"""Columns that are summed by themselves; a block's, where scales are of blocks."""


@triton.jit
def _sum_part(
    inputs_desc, numbers_desc, x_scales_ptr, weight_scales_ptr, first_token, row, t, is_token, scale_row, is_row,
    scale_stride, low, high,
    X_GROUPS: tl.constexpr, WEIGHT_GROUPS: tl.constexpr, IS_ROUNDED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product of a tile [BLOCK_N, WIDTH] over the columns ``low`` to ``high``, times its scales."""
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for column in range(low, high, BLOCK_K):
        weight = numbers_desc.load([row, column])
        x = inputs_desc.load([first_token, column]).T
        if not IS_ROUNDED:
            weight = weight.to(x.dtype)
        if WEIGHT_GROUPS == 1 and X_GROUPS <= 1:
            total = tl.dot(weight, x, total, input_precision="ieee")
        else:
            product = tl.dot(weight, x, input_precision="ieee")
            if WEIGHT_GROUPS > 1:
                scale = tl.load(weight_scales_ptr + scale_row + column // BLOCK_K, mask=is_row, other=0.0)
                product *= scale[:, None]
            if X_GROUPS > 1:
                scale = tl.load(x_scales_ptr + column // BLOCK_K * scale_stride + t, mask=is_token, other=0.0)
                product *= scale[None, :]
            total += product
    if WEIGHT_GROUPS == 1:
        total *= tl.load(weight_scales_ptr + scale_row, mask=is_row, other=0.0)[:, None]
    if X_GROUPS == 1:
        total *= tl.load(x_scales_ptr + t, mask=is_token, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _fp8_kernel(
    inputs_desc,  # [T, K], by [WIDTH, BLOCK_K]
    numbers_desc,  # [N, K] fp8, by [BLOCK_N, BLOCK_K]
    x_scales_ptr,  # [X_GROUPS, T or more] float32
    weight_scales_ptr,  # [N / SCALE_ROWS, WEIGHT_GROUPS] float32
    bias_ptr,  # [N]
    out_ptr,  # [T, N], or [SPLITS, T, N] float32
    num_tokens,
    scale_stride,
    out_features,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # a program computes one part of K and leaves the sum to others
    X_GROUPS: tl.constexpr,  # 0: no scales
    WEIGHT_GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first_token = tl.program_id(0) * WIDTH
    row = tl.program_id(1) * BLOCK_N
    n = row + tl.arange(0, BLOCK_N)
    t = first_token + tl.arange(0, WIDTH)
    is_token, is_row = t < num_tokens, n < out_features
    PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * PART
    scale_row = n // SCALE_ROWS * WEIGHT_GROUPS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    summed = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for split in tl.static_range(1 if IS_SPLIT else SPLITS):
        low = first + split * PART
        summed += _sum_part(
            inputs_desc, numbers_desc, x_scales_ptr, weight_scales_ptr, first_token, row, t, is_token, scale_row,
            is_row, scale_stride, low, tl.minimum(low + PART, K),
            X_GROUPS, WEIGHT_GROUPS, IS_ROUNDED, WIDTH, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if HAS_BIAS:
        summed += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + tl.program_id(2).to(tl.int64) * num_tokens * out_features
    place = t.to(tl.int64)[:, None] * out_features + n[None, :]
    inside = is_token[:, None] & is_row[None, :]
    tl.store(out + place, tl.trans(summed).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """Tile sizes for a number of rows; they do not change the result."""

    width: int
    """Rows of x."""
    block_n: int
    num_warps: int
    num_stages: int


def fp8_product(
    x: Rounded,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    *,
    splits: int,
    tiling: Fp8Tiling,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """``x`` [T, K] by the ``matrix`` [N, K]: [T, N] of ``dtype``, or float32 parts [splits, T, N] where it is None."""
    num_tokens, size = x.numbers.shape
    out_features, is_split = matrix.numbers.shape[0], dtype is None
    parts = (splits,) if is_split else ()
    out = torch.empty(*parts, num_tokens, out_features, dtype=dtype or torch.float32, device=x.numbers.device)
    groups = triton.cdiv(num_tokens, tiling.width)
    rows = with_room(x.numbers, groups * tiling.width)
    stage_bytes = BLOCK_K * (tiling.block_n + tiling.width * x.numbers.dtype.itemsize)
    unused = matrix.scales
    _fp8_kernel[(groups, triton.cdiv(out_features, tiling.block_n), splits if is_split else 1)](
        TensorDescriptor.from_tensor(rows, [tiling.width, BLOCK_K]),
        TensorDescriptor.from_tensor(matrix.numbers, [tiling.block_n, BLOCK_K]),
        unused if x.scales is None else x.scales, matrix.scales, unused if bias is None else bias,
        out, num_tokens, 0 if x.scales is None else x.scales.shape[1], out_features,
        K=size, SPLITS=splits, IS_SPLIT=is_split, X_GROUPS=0 if x.scales is None else x.scales.shape[0],
        WEIGHT_GROUPS=matrix.scales.shape[1], SCALE_ROWS=matrix.rows, IS_ROUNDED=x.numbers.dtype.itemsize == 1,
        HAS_BIAS=bias is not None and not is_split, WIDTH=tiling.width, BLOCK_N=tiling.block_n, BLOCK_K=BLOCK_K,
        num_warps=tiling.num_warps, num_stages=stages_within(tiling.num_stages, stage_bytes, out.device),
        enable_fp_fusion=False, **launch_options(out),
    )  # fmt: skip
    return out
