# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``paged_attention`` of batches in which some row has many queries: prompts, and their chunks beside rows that decode.

Rows are cut into tiles, large for many queries and small for few, and the keys of a tile into parts, so that all parts
of the batch take about equally long: a chunk over a long context is spread over the device, and is not waited for by
what runs beside it. Every program works out from the lengths which part is its own, before it waits; so one captured
launch serves every batch of its shape. A tile's parts are added up, in their order, by the program that finishes last,
as a counter tells, which is left at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from outrider.kernels.launching import launch_options, num_processors
from outrider.kernels.paged_attention.device_plan import MAX_DECODE_QUERIES, DevicePlan, can_take_chunks
from outrider.kernels.paged_attention.tiles import attend_tile

_LOG2_E = 1.4426950408889634
_FEW_QUERIES = 8
"""A row of no more takes a small tile."""
_ROWS = 256
"""Looked through at once; more need a kernel of their own."""
_LEAST_BLOCKS = 4
"""Least number of key blocks in a part."""


@triton.jit
def _find_part(
    query_starts_ptr, context_lengths_ptr, part, num_rows, window, budget,
    GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr, LARGE_M: tl.constexpr, SMALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, LEAST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Row, tile and number of the ``part``-th part of all, into how many its tile is cut, how many parts of cut tiles
    come before its tile's first and how many cut tiles before its tile. The row is ``num_rows`` or more when there are
    not this many parts. A share is what each program should do, in quarters of what a block of keys costs a large tile.
    """
    r = tl.arange(0, ROWS)
    is_row = r < num_rows
    counts = tl.load(query_starts_ptr + r + 1, mask=is_row, other=0)
    counts -= tl.load(query_starts_ptr + r, mask=is_row, other=0)
    seen = tl.load(context_lengths_ptr + r, mask=is_row, other=0)
    if HAS_WINDOW:
        seen = tl.minimum(seen, SINKS + window + tl.minimum(counts, LARGE_M // GROUP + 1))
    is_small = counts * GROUP <= SMALL_M
    tiles = tl.where(is_small, (counts > 0).to(tl.int32), tl.cdiv(counts * GROUP, LARGE_M))
    cost = tl.cdiv(seen, BLOCK_N) * tl.where(is_small, 2, 4)
    share = tl.maximum(tl.cdiv(tl.sum(tiles * cost), budget), 4 * LEAST_BLOCKS)
    cuts = tl.maximum((cost + share // 2) // share, 1)
    parts = tiles * cuts
    # Large tiles come first: what is short fills the gaps that they leave at the end.
    large = tl.where(is_small, 0, parts)
    num_large = tl.sum(large)
    is_large = part < num_large
    rest = part - tl.where(is_large, 0, num_large)
    likes = tl.where(is_large, large, parts - large)
    ends = tl.cumsum(likes)
    row = tl.sum((ends <= rest).to(tl.int32))
    rest -= tl.sum(tl.where(r == row, ends - likes, 0))
    num_cuts = tl.maximum(tl.sum(tl.where(r == row, cuts, 0)), 1)
    tile = rest // num_cuts
    is_cut_before = (r < row) & (cuts > 1)
    parts_before = tl.sum(tl.where(is_cut_before, parts, 0)) + tile * num_cuts
    tiles_before = tl.sum(tl.where(is_cut_before, tiles, 0)) + tile
    return row, tile, rest % num_cuts, num_cuts, parts_before, tiles_before


@triton.jit(
    do_not_specialize=["num_rows", "window", "budget", "slots"],
    # Read number by number from wherever they lie: no kernel of its own for each alignment.
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lengths_ptr", "page_starts_ptr", "pages_ptr"],
)
def _attend_chunks_kernel(
    query_ptr,  # [T, H, D], rows query_stride apart
    kv_ptr,  # [S, 2, H_kv, D]
    out_ptr,  # [T, H, D]
    query_starts_ptr,  # [B+1]
    context_lengths_ptr,  # [B]
    page_starts_ptr,  # [B+1]
    pages_ptr,
    sums_ptr,  # [H_kv, slots, LARGE_M, BLOCK_D] float32
    stats_ptr,  # [H_kv, slots, 2, LARGE_M] float32: the largest score and the sum of weights
    counters_ptr,  # [cut tiles, H_kv]
    sink_logits_ptr,  # [H] float32; None: no sinks
    query_stride,
    scale,  # includes log2(e)
    value_scale,  # None: 1
    window,
    num_rows,
    budget,
    slots,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LARGE_M: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    row, tile, part, num_cuts, parts_before, tiles_before = _find_part(
        query_starts_ptr, context_lengths_ptr, tl.program_id(1), num_rows, window, budget,
        GROUP, HAS_WINDOW, SINKS, LARGE_M, SMALL_M, BLOCK_N, ROWS, LEAST_BLOCKS,
    )  # fmt: skip
    if row >= num_rows:
        return
    first_query = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - first_query
    first_position = tl.load(context_lengths_ptr + row) - num_queries
    page_ptr = pages_ptr + tl.load(page_starts_ptr + row)
    slot = kv_head * slots + parts_before
    counter = tiles_before * NUM_KV_HEADS + kv_head
    if num_queries * GROUP <= SMALL_M:
        attend_tile(
            query_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, counters_ptr, page_ptr, sink_logits_ptr, query_stride,
            scale, value_scale, window, first_query, num_queries, first_position, kv_head, tile, part, num_cuts, slot,
            counter, PAGE_SIZE, GROUP, NUM_KV_HEADS, HEAD_DIM, HAS_WINDOW, SINKS, SOFTCAP, SMALL_M, BLOCK_N, BLOCK_D,
            LARGE_M, False, STAGES, 4, "tf32", PDL,
        )  # fmt: skip
    else:
        attend_tile(
            query_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, counters_ptr, page_ptr, sink_logits_ptr, query_stride,
            scale, value_scale, window, first_query, num_queries, first_position, kv_head, tile, part, num_cuts, slot,
            counter, PAGE_SIZE, GROUP, NUM_KV_HEADS, HEAD_DIM, HAS_WINDOW, SINKS, SOFTCAP, LARGE_M, BLOCK_N, BLOCK_D,
            LARGE_M, True, STAGES, 1, "tf32", PDL,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkTiling:
    """Tiling of a launch."""

    large_m: int
    block_n: int
    num_warps: int
    num_stages: int


_TILING = ChunkTiling(large_m=128, block_n=128, num_warps=8, num_stages=3)


def takes_chunks(query: torch.Tensor, max_queries: int) -> bool:
    """True if these tiles are for a batch in which some row may have ``max_queries``, and fit the device."""
    return max_queries > MAX_DECODE_QUERIES and can_take_chunks(query.dtype, query.shape[-1], query.device)


def attend_chunks(
    query: torch.Tensor,
    kv: torch.Tensor,
    plan: DevicePlan,
    *,
    tiling: ChunkTiling = _TILING,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    value_scale: float | None = None,
    budget: int | None = None,
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over ``kv`` [S, 2, H_kv, D], two bytes a number, with ``sink_logits`` [H] float32 or
    None; returns [T, H, D], of which rows of no query are left unwritten. Each KV head's work is cut into about
    ``budget`` parts, or as many as there are processors for.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    rows = plan.rows
    num_rows = rows.context_lengths.shape[0]
    if not num_tokens or not num_rows:
        return out
    group = num_heads // num_kv_heads
    budget = budget or max(1, num_processors(query.device) // num_kv_heads)
    num_parts = budget + num_tokens * group // tiling.large_m + min(num_rows, num_tokens)
    # A tile is cut from one and a half shares on: into a third more parts than it has shares, at most.
    slots = budget + budget // 3
    block_d = max(16, triton.next_power_of_2(head_dim))
    sums = torch.empty(num_kv_heads * slots * tiling.large_m * block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(num_kv_heads * slots * 2 * tiling.large_m, dtype=torch.float32, device=query.device)
    _attend_chunks_kernel[(num_kv_heads, num_parts)](
        query, kv, out, rows.query_starts, rows.context_lengths, rows.page_starts, rows.pages, sums, stats,
        rows.counters, sink_logits, query.stride(0), (scale or head_dim**-0.5) * _LOG2_E, value_scale,
        plan.window or 0, num_rows, budget, slots,
        PAGE_SIZE=plan.page_size, GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, SOFTCAP=softcap or 0.0, LARGE_M=tiling.large_m,
        SMALL_M=min(64, max(16, triton.next_power_of_2(_FEW_QUERIES * group))), BLOCK_N=tiling.block_n,
        BLOCK_D=block_d, ROWS=max(_ROWS, triton.next_power_of_2(num_rows)), LEAST_BLOCKS=_LEAST_BLOCKS,
        STAGES=tiling.num_stages, num_warps=tiling.num_warps, **launch_options(query),
    )  # fmt: skip
    return out
