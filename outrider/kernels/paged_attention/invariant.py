# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Batch-invariant ``paged_attention``: an output depends on its query and on the keys up to its position alone.

A program joins all segments of its tile itself, or leaves the results of its segments in memory for the tile's last
program to join in the same order. All tiles use the same instruction, and all rows of a tile the same layout, so a
tile's height and a query's place in it do not matter either. A key that a query does not see adds exact zeros. The
compiler may not contract a multiplication and an addition (``enable_fp_fusion``): where it does is its own choice in
each variant of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.paged_attention.device_plan import DevicePlan
from outrider.kernels.paged_attention.schedule import read_part
from outrider.kernels.paged_attention.segment_schedule import (
    Division,
    SegmentTiling,
    choose_segment_tiling,
    rows_of_slot,
    scheduled_segments,
)
from outrider.kernels.paged_attention.segments import (
    attend_keys,
    fetch_block,
    first_key_of,
    join_segments,
    segment_from,
    segment_of,
    segment_start,
)
from outrider.kernels.paged_attention.tiles import first_state, places_of, positions_of, store_mean
from outrider.kernels.room import empty_rows

_LOG2_E = 1.4426950408889634
_FETCHED_ROWS = 128
"""Number of segments that are fetched at once to be joined."""


@triton.jit
def _segments_of(part, num_cuts, first, highest, first_segment, BLOCK_N: tl.constexpr):
    """First segment that begins in a part's share of the keys from ``first`` to ``highest``, and the end of them."""
    share = tl.cdiv(tl.cdiv(highest + 1 - first, BLOCK_N), num_cuts) * BLOCK_N
    begin = tl.maximum(segment_from(first + part * share, BLOCK_N), first_segment + (part > 0))
    end = tl.maximum(segment_from(first + (part + 1) * share, BLOCK_N), first_segment + 1)
    return tl.where(part == 0, first_segment, begin), end


@triton.jit
def _store_segment(
    sums_ptr, stats_ptr, slot, largest, weight_sum, total, inside,
    BLOCK_M: tl.constexpr, SLOT_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Leave a segment's result in memory."""
    i, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tl.store(sums_ptr + slot * (SLOT_M * BLOCK_D) + i[:, None] * BLOCK_D + d[None, :], total, mask=inside)
    tl.store(stats_ptr + slot * 2 * SLOT_M + i, largest, mask=i < SLOT_M)
    tl.store(stats_ptr + slot * 2 * SLOT_M + SLOT_M + i, weight_sum, mask=i < SLOT_M)


@triton.jit(
    do_not_specialize=["window", "num_parts", "slots"],
    do_not_specialize_on_alignment=["pages_ptr", "schedule_ptr"],
)
def _attend_segments_kernel(
    query_ptr,  # [T, H, D], rows query_stride apart
    kv_ptr,  # [S, 2, H_kv, D]
    out_ptr,  # [T, H, D]
    pages_ptr,
    schedule_ptr,  # [FIELDS, P]
    sums_ptr,  # [H_kv, slots, SLOT_M, BLOCK_D] float32
    stats_ptr,  # [H_kv, slots, 2, SLOT_M] float32: the largest score and the sum of weights
    counters_ptr,  # [cut tiles, H_kv]
    sink_logits_ptr,  # [H] float32; None: no sinks
    query_stride,
    scale,  # includes log2(e)
    value_scale,  # None: 1
    window,
    num_parts,
    slots,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLOT_M: tl.constexpr,  # rows of a tile that may have queries
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    SINK_END: tl.constexpr = (SINKS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    SLOT_SIZE: tl.constexpr = SLOT_M * BLOCK_D
    kv_head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    field = schedule_ptr + tl.program_id(1)
    num_queries, first_query, first_position, first_page, tile, part, num_cuts, cut_tile = read_part(field, num_parts)
    first_slot = tl.load(field + 8 * num_parts, cache_modifier=".cg")
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    page_ptr = pages_ptr + first_page
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // GROUP
    position = first_position + query
    d = tl.arange(0, BLOCK_D)
    inside = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]

    # The keys that any query of this tile sees.
    lowest, highest = positions_of(tile, first_position, num_queries, GROUP, BLOCK_M)
    first = first_key_of(lowest, window, HAS_WINDOW, BLOCK_N)
    first_segment = segment_of(first, BLOCK_N)
    end_segment = segment_of(highest, BLOCK_N) + 1
    begin, end = _segments_of(part, num_cuts, first, highest, first_segment, BLOCK_N)
    if PDL:
        fetched = tl.maximum(segment_start(begin, BLOCK_N), first)
        fetch_block(fetched, highest, page_ptr, kv_ptr, kv_head, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D)
        gdc_wait()
    place = places_of(m, first_query, kv_head, query_stride, GROUP, HEAD_DIM, BLOCK_D)
    queries = tl.load(query_ptr + place, mask=inside, other=0.0)
    if num_cuts == 1:
        skipped = 0
        low = first
        if SINK_END > 0:
            skipped = tl.maximum(first - SINK_END, 0)
            low = 0
        largest, weight_sum = first_state(sink_logits_ptr, kv_head, m, True, GROUP)
        largest, weight_sum, total = attend_keys(
            low, highest + 1 - skipped, lowest, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
            largest, weight_sum,
            BLOCK_M, True, HAS_WINDOW, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
            STAGES, PDL,
        )  # fmt: skip
        out = places_of(m, first_query, kv_head, NUM_KV_HEADS * GROUP * HEAD_DIM, GROUP, HEAD_DIM, BLOCK_D)
        store_mean(out_ptr + out, total, weight_sum, value_scale, inside)
        return

    largest, weight_sum = first_state(None, kv_head, m, True, GROUP)
    slot = (kv_head * slots + first_slot).to(tl.int64)
    for segment in range(begin, tl.minimum(end, end_segment)):
        own_largest, own_sum, total = attend_keys(
            tl.maximum(segment_start(segment, BLOCK_N), first),
            tl.minimum(segment_start(segment + 1, BLOCK_N), highest + 1),
            lowest, 0, page_ptr, kv_ptr, kv_head, queries, position, scale, window, largest, weight_sum,
            BLOCK_M, False, HAS_WINDOW, 0, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
            STAGES, PDL,
        )  # fmt: skip
        _store_segment(
            sums_ptr, stats_ptr, slot + segment - first_segment, own_largest, own_sum, total, inside,
            BLOCK_M, SLOT_M, BLOCK_D,
        )  # fmt: skip
    tl.debug_barrier()  # all of this program's stores come before its count
    counter = counters_ptr + cut_tile * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_cuts - 1:
        tl.store(counter, 0)
        _join_slots(
            out_ptr, sums_ptr + slot * SLOT_SIZE, stats_ptr + slot * 2 * SLOT_M, sink_logits_ptr, value_scale,
            end_segment - first_segment,
            first_query, num_queries, tile * BLOCK_M, kv_head,
            GROUP, NUM_KV_HEADS, HEAD_DIM, SLOT_M, BLOCK_D, UNROLLED,
        )  # fmt: skip


@triton.jit
def _join_slots(
    out_ptr, sums_ptr, stats_ptr, sink_logits_ptr, value_scale, num_segments, first_query, num_queries, first_m,
    kv_head, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOT_M: tl.constexpr,
    BLOCK_D: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile from what its segments have left in memory."""
    i = tl.arange(0, SLOT_M)
    d = tl.arange(0, BLOCK_D)
    m = first_m + i
    inside = (m // GROUP < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    largest, weight_sum = first_state(sink_logits_ptr, kv_head, m, True, GROUP)
    total = tl.zeros([SLOT_M, BLOCK_D], tl.float32)
    for first in range(0, num_segments, UNROLLED):
        for step in tl.static_range(UNROLLED):
            # Past the first-level cache, which does not see what other processors wrote.
            slot = first + step
            is_there = slot < num_segments
            stats = stats_ptr + slot * 2 * SLOT_M + i
            sums = sums_ptr + slot * SLOT_M * BLOCK_D + i[:, None] * BLOCK_D + d[None, :]
            next_largest = tl.load(stats, mask=is_there, other=float("-inf"), cache_modifier=".cg")
            next_sum = tl.load(stats + SLOT_M, mask=is_there, other=0.0, cache_modifier=".cg")
            next_total = tl.load(sums, mask=inside & is_there, other=0.0, cache_modifier=".cg")
            largest, weight_sum, total = join_segments(largest, weight_sum, total, next_largest, next_sum, next_total)
    out = places_of(m, first_query, kv_head, NUM_KV_HEADS * GROUP * HEAD_DIM, GROUP, HEAD_DIM, BLOCK_D)
    store_mean(out_ptr + out, total, weight_sum, value_scale, inside)


def attend_segments(
    query: torch.Tensor,
    kv: torch.Tensor,
    plan: DevicePlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    value_scale: float | None = None,
    tiling: SegmentTiling | None = None,
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over ``kv`` [S, 2, H_kv, D], with ``sink_logits`` [H] float32 or None; returns
    [T, H, D], of which rows of no query are left unwritten. A given ``tiling`` must be that of the plan's schedule.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    out = empty_rows(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    num_rows = plan.rows.context_lengths.shape[0]
    tiling = tiling or choose_segment_tiling(num_rows, plan.rows.max_queries, group, head_dim)
    plan = scheduled_segments(
        plan, num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, tiling=tiling
    )
    if plan.schedule is None:
        return out
    division = Division.of(plan, tiling, num_tokens, group, num_kv_heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    slot_m = rows_of_slot(plan.rows.max_queries, group, tiling)
    slots = num_kv_heads * division.slots * slot_m
    sums = torch.empty(slots * block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(2 * slots, dtype=torch.float32, device=query.device)
    _attend_segments_kernel[(num_kv_heads, division.num_parts)](
        query, kv, out, plan.rows.pages, plan.schedule, sums, stats, plan.rows.counters,
        sink_logits, query.stride(0), (scale or head_dim**-0.5) * _LOG2_E, value_scale, plan.window or 0,
        division.num_parts, division.slots,
        PAGE_SIZE=plan.page_size, GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, SOFTCAP=softcap or 0.0,
        BLOCK_M=tiling.block_m, SLOT_M=slot_m, BLOCK_N=tiling.block_n, BLOCK_D=block_d,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        STAGES=tiling.num_stages, UNROLLED=max(2, min(16, _FETCHED_ROWS // slot_m)), num_warps=tiling.num_warps,
        enable_fp_fusion=False, **launch_options(query),
    )  # fmt: skip
    return out
