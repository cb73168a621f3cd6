# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Stream-K product of a few rows on a GPU, for weights whose tiles no split of K distributes evenly.

Four programs compute three tiles of the weight. Each computes three quarters of a tile's columns and begins where the
program before it ended, so every tile has two partial sums. The tiles are those of ``split_k``.

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication" (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.linear.selection import Tiling
from outrider.kernels.linear.split_k import columns, constants, described, fetch_rows, store_transposed


@triton.jit(do_not_specialize=["num_tokens"])
def _stream_k_kernel(
    x_desc,  # [T, K], by [WIDTH, BLOCK_K]
    rest_desc,  # [T, K], by [REST, BLOCK_K]
    weight_desc,  # [N, K], by [BLOCK_N, BLOCK_K]
    weight_ptr,  # [N, K]
    partials_ptr,  # [2, T, N] float32
    num_tokens,
    out_features,
    K: tl.constexpr,
    FETCHED: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    QUOTA: tl.constexpr = K // 4 * 3  # columns of a program, those of one tile coming after those of another
    first = tl.program_id(0) * QUOTA
    tile = first // K
    low = first % K
    high = tl.minimum(low + QUOTA, K)
    if PDL:
        gdc_launch_dependents()
        if FETCHED > 0:
            fetch_rows(weight_ptr, tile * BLOCK_N, out_features, low, K, BLOCK_N, FETCHED)
        gdc_wait()
    left = QUOTA
    for segment in tl.static_range(2):
        if left > 0:
            row = tile * BLOCK_N
            total, rest = columns(
                x_desc, rest_desc, weight_desc, 0, row, low, high, WIDTH, REST, HAS_REST, BLOCK_N, BLOCK_K
            )
            if segment == 0 and PDL and FETCHED > 0:
                fetch_rows(weight_ptr, row + BLOCK_N, out_features, 0, K, BLOCK_N, FETCHED)
            n = row + tl.arange(0, BLOCK_N)
            partial = tl.program_id(0) - tile * K // QUOTA  # the tile's first program, or its second
            out_ptr = partials_ptr + partial.to(tl.int64) * num_tokens * out_features
            store_transposed(total, out_ptr, 0, num_tokens, n, out_features, WIDTH)
            if HAS_REST:
                store_transposed(rest, out_ptr, WIDTH, num_tokens, n, out_features, REST)
        left -= high - low
        tile += 1
        low = 0
        high = left


def can_stream_k(weight: torch.Tensor, tiling: Tiling) -> bool:
    """True if ``stream_k_partials`` can divide ``weight`` [N, K] without remainder."""
    out_features, size = weight.shape
    return out_features % (3 * tiling.block_n) == 0 and size % (4 * tiling.block_k) == 0


def stream_k_partials(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Partial sums of ``x`` [T, K] times ``weight`` [N, K] transposed, float32 [2, T, N]; requires ``can_stream_k``."""
    num_tokens, size = x.shape
    out_features = weight.shape[0]
    partials = torch.empty(2, num_tokens, out_features, dtype=torch.float32, device=x.device)
    _stream_k_kernel[(out_features // tiling.block_n // 3 * 4,)](
        *described(x, weight, tiling), weight, partials, num_tokens, out_features,
        K=size, **constants(tiling), **launch_options(x),
    )  # fmt: skip
    return partials
