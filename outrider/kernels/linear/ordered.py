# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Product of any number of rows on a GPU in one order of sums: the kernel of batch-invariant weights.

Order: K is cut into parts, as ``split_k`` cuts it. Each part is summed in float32 from its first column to its last, in
the matrix unit's steps. The parts are added in order, then the bias; the result is rounded once. Tiles only decide
which program computes an element, not how, so they may follow the number of rows.

A program computes one tile after another. Parts that are already summed lie in the program's own memory, which stays in
the second-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels.launching import launch_options, num_processors
from outrider.kernels.linear.split_k import PART_COLUMNS, add_to_product, fetch_rows
from outrider.kernels.room import empty_rows, with_room

_PART_COLUMNS = tl.constexpr(PART_COLUMNS)


@triton.jit
def _sum_part(
    x_desc, weight_desc, first_token, row, up_row, low, high,
    IS_GATED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product of a tile over the columns ``low`` to ``high``; of a gated one, the gate's and the other half's."""
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    up = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for column in range(low, high, BLOCK_K):
        x = x_desc.load([first_token, column]).T
        total = tl.dot(weight_desc.load([row, column]), x, total)
        if IS_GATED:
            up = tl.dot(weight_desc.load([up_row, column]), x, up)
    return total, up


@triton.jit
def _place_of(tile, groups, tiles_of_weight, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """First token and first row of the weight of a tile; a band of groups of tokens goes through the weight at once."""
    in_band = BAND * tiles_of_weight
    first_group = tile // in_band * BAND
    band = tl.minimum(groups - first_group, BAND)
    return (first_group + tile % in_band % band) * WIDTH, tile % in_band // band * BLOCK_N


@triton.jit
def _gated(total, up, DTYPE: tl.constexpr):
    """``silu(total) * up``, of factors that are rounded as the product is where ``swiglu`` comes after it."""
    total = total.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    return total / (1.0 + tl.exp(-total)) * up


@triton.jit(do_not_specialize=["num_tokens"])
def _ordered_kernel(
    x_desc,  # [T, K], by [WIDTH, BLOCK_K]
    weight_desc,  # [N, K], of a gated product [2 N, K], by [BLOCK_N, BLOCK_K]
    weight_ptr,  # the same
    bias_ptr,  # [N] or [2 N]
    out_ptr,  # [T, N]
    sums_ptr,  # [programs, BLOCK_N * WIDTH] float32
    num_tokens,
    size,  # N
    K: tl.constexpr,
    PARTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FETCHED: tl.constexpr,  # columns of the first tile's weight that are fetched ahead
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,  # tiles of rows of x that are computed together
    PDL: tl.constexpr,
):
    PART: tl.constexpr = (K + PARTS * _PART_COLUMNS - 1) // (PARTS * _PART_COLUMNS) * _PART_COLUMNS
    program = tl.program_id(0)
    groups = tl.cdiv(num_tokens, WIDTH)
    tiles_of_weight = tl.cdiv(size, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        if FETCHED > 0:
            fetch_rows(weight_ptr, program * BLOCK_N, size, 0, K, BLOCK_N, FETCHED)
            if IS_GATED:
                fetch_rows(weight_ptr, size + program * BLOCK_N, 2 * size, 0, K, BLOCK_N, FETCHED)
        gdc_wait()
    i = tl.arange(0, BLOCK_N)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    own_sums = sums_ptr + program.to(tl.int64) * (BLOCK_N * WIDTH) + i
    for tile in range(program, groups * tiles_of_weight, tl.num_programs(0)):
        first_token, row = _place_of(tile, groups, tiles_of_weight, WIDTH, BLOCK_N, BAND)
        n = row + tl.arange(0, BLOCK_N)
        total, up = _sum_part(
            x_desc, weight_desc, first_token, row, size + row, 0, tl.minimum(PART, K), IS_GATED, WIDTH, BLOCK_N, BLOCK_K
        )
        for part in tl.static_range(1, PARTS):
            tl.store(own_sums, total)
            total, up = _sum_part(
                x_desc, weight_desc, first_token, row, size + row, part * PART, tl.minimum((part + 1) * PART, K),
                IS_GATED, WIDTH, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            tl.debug_barrier()
            total = add_to_product(total, tl.load(own_sums))
        if HAS_BIAS:
            bias = tl.load(bias_ptr + n, mask=n < size, other=0.0)
            total = add_to_product(total, bias.to(tl.float32)[:, None])
        if IS_GATED:
            if HAS_BIAS:
                bias = tl.load(bias_ptr + size + n, mask=n < size, other=0.0)
                up = add_to_product(up, bias.to(tl.float32)[:, None])
            total = _gated(total, up, out_ptr.dtype.element_ty)
        t = first_token + tl.arange(0, WIDTH)
        place = t.to(tl.int64)[:, None] * size + n[None, :]
        inside = (t < num_tokens)[:, None] & (n < size)[None, :]
        tl.store(out_ptr + place, tl.trans(total.to(out_ptr.dtype.element_ty)), mask=inside)


@dataclass(frozen=True, slots=True)
class OrderedTiling:
    """Tiles of a launch."""

    width: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fetched: int = 0
    band: int = 8
    per_processor: int = 0
    """Programs of a processor; 0: a program for each tile."""


def ordered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: OrderedTiling,
    *,
    parts: int = 1,
    is_gated: bool = False,
) -> torch.Tensor:
    """``x`` [T, K] by ``weight`` [N, K], plus ``bias`` [N]: [T, N].

    Gated, the weight is [2 N, K], and silu(gate) * up of its halves is returned. ``parts`` of K are summed one by one.
    """
    num_tokens, size = x.shape
    out_features = weight.shape[0] // (2 if is_gated else 1)
    out = empty_rows(num_tokens, out_features, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    groups = triton.cdiv(num_tokens, tiling.width)
    programs = groups * triton.cdiv(out_features, tiling.block_n)
    if tiling.per_processor:
        programs = min(programs, tiling.per_processor * num_processors(x.device))
    num_sums = programs * tiling.block_n * tiling.width if parts > 1 else 0
    sums = torch.empty(num_sums, dtype=torch.float32, device=x.device)
    x = with_room(x, groups * tiling.width)
    _ordered_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tiling.width, tiling.block_k]),
        TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
        weight, weight if bias is None else bias, out, sums, num_tokens, out_features,
        K=size, PARTS=parts, IS_GATED=is_gated, HAS_BIAS=bias is not None, FETCHED=tiling.fetched,
        WIDTH=tiling.width, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, BAND=tiling.band,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x),
    )  # fmt: skip
    return out
