# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Products of a few rows on a GPU, whose whole cost is reading the weight.

The weight's rows are the rows of the matrix unit's tile, the few rows of x its columns. A product begins to fetch its
weight into the second-level cache while the kernel before it still runs. The sum over K may be split over programs; the
one that finishes last adds up. Counters are zero between launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.fetching import fetch_ahead
from outrider.kernels.launching import launch_options
from outrider.kernels.linear.split_k import PART_COLUMNS

_PART_COLUMNS = tl.constexpr(PART_COLUMNS)


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    sums_ptr,  # [N / BLOCK_N, SPLITS, BLOCK_N, BLOCK_T] float32
    counters_ptr,  # [N / BLOCK_N]
    num_tokens,
    out_features,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    FETCHED: tl.constexpr,  # columns of the weight fetched ahead
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_weight = n < out_features
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    PART: tl.constexpr = (K + SPLITS * _PART_COLUMNS - 1) // (SPLITS * _PART_COLUMNS) * _PART_COLUMNS
    low = split * PART
    high = tl.minimum(low + PART, K)
    row_ptr = weight_ptr + tl.where(in_weight, n, 0).to(tl.int64)[:, None] * K
    if PDL:
        gdc_launch_dependents()
        if FETCHED > 0:
            line = low + tl.arange(0, FETCHED // 64) * 64
            fetch_ahead(row_ptr + tl.minimum(line, K - 1)[None, :])
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(low, high, BLOCK_K):
        column = start + k
        in_row = column < high
        weight = tl.load(row_ptr + column[None, :], mask=in_weight[:, None] & in_row[None, :], other=0.0)
        x = tl.load(
            x_ptr + t[None, :] * K + column[:, None], mask=(t < num_tokens)[None, :] & in_row[:, None], other=0.0
        )
        total = tl.dot(weight, x, total, input_precision=PRECISION)
    if SPLITS > 1:
        i = tl.arange(0, BLOCK_N)
        sums = sums_ptr + tile * SPLITS * BLOCK_N * BLOCK_T + i[:, None] * BLOCK_T + t[None, :]
        tl.store(sums + split * BLOCK_N * BLOCK_T, total)
        tl.debug_barrier()  # all of this program's stores come before its count
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for other in tl.static_range(SPLITS):
            # Past the first-level cache, which does not see what other processors wrote.
            total += tl.load(sums + other * BLOCK_N * BLOCK_T, cache_modifier=".cg")
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=in_weight, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + t[None, :] * out_features + n[:, None]
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=in_weight[:, None] & (t < num_tokens)[None, :])


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """Tiling of a product."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    fetched: int


def skinny_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counters: torch.Tensor, tiling: SkinnyTiling
) -> torch.Tensor:
    """``x`` [T, K] of few rows by ``weight`` [N, K]; ``counters`` [N / block_n] int32 are zero, and zero after."""
    num_tokens, size = x.shape
    out_features = weight.shape[0]
    tiles = triton.cdiv(out_features, tiling.block_n)
    block_t = max(16, triton.next_power_of_2(num_tokens))
    y = torch.empty(num_tokens, out_features, dtype=x.dtype, device=x.device)
    num_sums = tiles * tiling.splits * tiling.block_n * block_t if tiling.splits > 1 else 0
    sums = torch.empty(num_sums, dtype=torch.float32, device=x.device)
    _skinny_kernel[(tiles, tiling.splits)](
        x, weight, weight if bias is None else bias, y, sums, counters, num_tokens, out_features,
        K=size, HAS_BIAS=bias is not None, SPLITS=tiling.splits, FETCHED=tiling.fetched,
        BLOCK_T=block_t, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x),
    )  # fmt: skip
    return y
