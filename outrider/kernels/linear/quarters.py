# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Products of some rows on a GPU whose tiles equal parts do not share out evenly: four programs take three tiles.

Each takes three quarters of a tile's columns, beginning where the one before it ended, so that every tile has two
addends. Tiles, and what is done with them, are those of ``streamed``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.linear.streamed import Tiling, columns, constants, described, fetch_rows, store_turned


@triton.jit(do_not_specialize=["num_tokens"])
def _quarters_kernel(
    x_desc,  # [T, K], by [WIDTH, BLOCK_K]
    rest_desc,  # [T, K], by [REST, BLOCK_K]
    weight_desc,  # [N, K], by [BLOCK_N, BLOCK_K]
    weight_ptr,  # [N, K]
    addends_ptr,  # [2, T, N] float32
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
            addend = tl.program_id(0) - tile * K // QUOTA  # the tile's first program, or its second
            out_ptr = addends_ptr + addend.to(tl.int64) * num_tokens * out_features
            store_turned(total, out_ptr, 0, num_tokens, n, out_features, WIDTH)
            if HAS_REST:
                store_turned(rest, out_ptr, WIDTH, num_tokens, n, out_features, REST)
        left -= high - low
        tile += 1
        low = 0
        high = left


def can_quarter(weight: torch.Tensor, tiling: Tiling) -> bool:
    """Whether ``quarters_of`` cuts ``weight`` [N, K] without remainder."""
    out_features, size = weight.shape
    return out_features % (3 * tiling.block_n) == 0 and size % (4 * tiling.block_k) == 0


def quarters_of(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """``x`` [T, K] by ``weight`` [N, K], which ``can_quarter``: float32 [2, T, N], whose sum is the product."""
    num_tokens, size = x.shape
    out_features = weight.shape[0]
    addends = torch.empty(2, num_tokens, out_features, dtype=torch.float32, device=x.device)
    _quarters_kernel[(out_features // tiling.block_n // 3 * 4,)](
        *described(x, weight, tiling), weight, addends, num_tokens, out_features,
        K=size, **constants(tiling), **launch_options(x),
    )  # fmt: skip
    return addends
