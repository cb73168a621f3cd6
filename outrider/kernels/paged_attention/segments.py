# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0915, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Batch-invariant ``paged_attention``: an output depends on its query and on the keys up to its position alone.

Keys are attended in blocks of fixed positions, and blocks belong to segments of fixed positions, two blocks long at
first and longer further on: sixteen to each doubling of the position. Inside a segment an online softmax goes from
block to block. The segments' results are joined from the first to the last. Which program computes a segment does not
change a bit: it joins all segments of its tile itself, or leaves them in memory for the tile's last program to join.

All tiles use the same instruction, and all rows of a tile the same layout, so a tile's height and a query's place in it
do not matter either. A key that a query does not see adds exact zeros. The compiler may not contract a multiplication
and an addition (``enable_fp_fusion``): where it does is its own choice in each variant of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options, num_processors
from outrider.kernels.paged_attention.device_plan import DevicePlan
from outrider.kernels.room import empty_rows

_LOG2_E = 1.4426950408889634
_FIELDS = 9
_SCHEDULED = 32
"""Parts that one program of the schedule works out."""
_FEWEST_ROWS = 32
"""Looked through at once."""
_FETCHED_ROWS = 128
"""Of segments that are fetched at once to be joined."""
_BLOCKS_OF_FIRST_SEGMENTS = tl.constexpr(2)


@triton.jit
def _segment_of(key, BLOCK_N: tl.constexpr):
    """Number of the segment of a key: its position in units of the first segments, as a float with four bits."""
    unit = key // (BLOCK_N * _BLOCKS_OF_FIRST_SEGMENTS)
    exponent = (tl.maximum(unit, 16).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 131
    return exponent * 16 + (unit >> exponent)


@triton.jit
def _segment_start(segment, BLOCK_N: tl.constexpr):
    """First key of a segment."""
    exponent = tl.maximum(segment // 16 - 1, 0)
    return ((segment - exponent * 16) << exponent) * (BLOCK_N * _BLOCKS_OF_FIRST_SEGMENTS)


@triton.jit
def _segment_from(key, BLOCK_N: tl.constexpr):
    """Number of the first segment that begins at a key or after it."""
    return tl.where(key > 0, _segment_of(tl.maximum(key - 1, 0), BLOCK_N) + 1, 0)


@triton.jit
def _pick(is_own, values):
    """Of each part, its row's value."""
    return tl.sum(tl.where(is_own, values[None, :], 0), 1)


@triton.jit
def _first_key(first_position, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key of the block from which on queries from ``first_position`` on see keys, sinks apart."""
    if HAS_WINDOW:
        return tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    return first_position * 0


@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "window", "budget", "slots"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lengths_ptr", "page_starts_ptr"],
)
def _segment_schedule_kernel(
    query_starts_ptr,  # [B+1]
    context_lengths_ptr,  # [B]
    page_starts_ptr,  # [B+1]
    schedule_ptr,  # [FIELDS, P]
    num_rows,
    num_parts,
    window,
    budget,
    slots,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.arange(0, ROWS)
    is_row = r < num_rows
    if PDL:
        gdc_wait()
    first_queries = tl.load(query_starts_ptr + r, mask=is_row, other=0)
    counts = tl.load(query_starts_ptr + r + 1, mask=is_row, other=0) - first_queries
    contexts = tl.load(context_lengths_ptr + r, mask=is_row & (counts > 0), other=0)
    tiles = tl.cdiv(counts * GROUP, BLOCK_M)
    first = _first_key(contexts - counts, window, HAS_WINDOW, BLOCK_N)
    blocks = tl.cdiv(contexts - first, BLOCK_N)
    segments = _segment_of(tl.maximum(contexts - 1, 0), BLOCK_N) - _segment_of(first, BLOCK_N) + 1
    share = tl.maximum(tl.cdiv(tl.sum(tiles * blocks), budget), 1)
    cuts = tl.maximum(tl.minimum((blocks + share // 2) // share, segments), 1)
    if SINKS > 0:
        cuts = tl.minimum(cuts, 1)
    # A slot for each segment of a cut tile; what finds none stays whole.
    needed = tl.where(cuts > 1, tiles * segments, 0)
    cuts = tl.where(tl.cumsum(needed) <= slots, cuts, 1)
    is_cut = cuts > 1
    needed = tl.where(is_cut, needed, 0)
    first_slots = tl.cumsum(needed) - needed
    cut_tiles = tl.where(is_cut, tiles, 0)
    counters = tl.cumsum(cut_tiles) - cut_tiles
    parts = tiles * cuts
    cut = tl.where(is_cut, parts, 0)
    whole = parts - cut
    starts = tl.where(is_cut, tl.cumsum(cut) - cut, tl.sum(cut) + tl.cumsum(whole) - whole)

    p = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    is_own = (p[:, None] >= starts[None, :]) & (p[:, None] < (starts + parts)[None, :])
    within = p - _pick(is_own, starts)
    own_cuts = tl.maximum(_pick(is_own, cuts), 1)
    # The last tiles of a prompt see most keys, and begin first.
    tile = tl.maximum(_pick(is_own, tiles) - 1 - within // own_cuts, 0)
    page_starts = tl.load(page_starts_ptr + r, mask=is_row, other=0)
    field = schedule_ptr + p
    exists = p < num_parts
    tl.store(field, _pick(is_own, counts), mask=exists)
    tl.store(field + num_parts, _pick(is_own, first_queries), mask=exists)
    tl.store(field + 2 * num_parts, _pick(is_own, contexts - counts), mask=exists)
    tl.store(field + 3 * num_parts, _pick(is_own, page_starts), mask=exists)
    tl.store(field + 4 * num_parts, tile, mask=exists)
    tl.store(field + 5 * num_parts, within % own_cuts, mask=exists)
    tl.store(field + 6 * num_parts, own_cuts, mask=exists)
    tl.store(field + 7 * num_parts, _pick(is_own, counters) + tile, mask=exists)
    tl.store(field + 8 * num_parts, _pick(is_own, first_slots) + tile * _pick(is_own, segments), mask=exists)
    if PDL:
        # Attention reads the schedule before it waits. No kernel is placed before this one ends, which lets none ahead;
        # what it wrote is then seen by the whole device.
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [p], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _key_at(place, skipped, SINK_END: tl.constexpr):
    """Position of the key at a place among those that are attended: ``skipped`` lie between sinks and window."""
    if SINK_END > 0:
        return tl.where(place < SINK_END, place, place + skipped)
    return place + skipped


@triton.jit
def _join(largest, weight_sum, total, next_largest, next_sum, next_total):
    """The next segment's result added to that of the segments before it."""
    new_largest = tl.maximum(largest, next_largest)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    fade, scale = tl.exp2(largest - base), tl.exp2(next_largest - base)
    weight_sum = weight_sum * fade + next_sum * scale
    total = total * fade[:, None] + next_total * scale[:, None]
    return new_largest, weight_sum, total


@triton.jit
def _attend_span(
    low, until, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
    largest, weight_sum, total, own_largest, own_sum, own_total,
    IS_MASKED: tl.constexpr, IS_JOINED: tl.constexpr, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend the keys at places from ``low`` until ``until``; not masked, every query sees all of them. Joined, the
    ``own`` result of a segment goes to those before it where the segment ends; otherwise the span is of one segment.
    """
    SINK_END: tl.constexpr = (SINKS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    place = tl.maximum(tl.minimum(low + j, high - 1), 0)
    page = tl.load(page_ptr + _key_at(place, skipped, SINK_END) // PAGE_SIZE)
    for start in tl.range(low, until, BLOCK_N, num_stages=STAGES):
        # Pages are looked up a block ahead, so that keys are fetched while others are multiplied.
        place = tl.minimum(start + BLOCK_N + j, high - 1)
        next_page = tl.load(page_ptr + _key_at(place, skipped, SINK_END) // PAGE_SIZE)
        place = start + j
        key = _key_at(place, skipped, SINK_END)
        token = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        pointers = kv_ptr + token[:, None] + d[None, :]
        if IS_MASKED:
            stored = (place < high)[:, None] & (d < HEAD_DIM)[None, :]
            keys = tl.load(pointers, mask=stored, other=0.0)
            values = tl.load(pointers + NUM_KV_HEADS * HEAD_DIM, mask=stored, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            keys = tl.load(pointers, mask=(d < HEAD_DIM)[None, :], other=0.0)
            values = tl.load(pointers + NUM_KV_HEADS * HEAD_DIM, mask=(d < HEAD_DIM)[None, :], other=0.0)
        else:
            keys = tl.load(pointers)
            values = tl.load(pointers + NUM_KV_HEADS * HEAD_DIM)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if IS_MASKED:
            visible = (place < high)[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                in_window = key[None, :] > position[:, None] - window
                if SINKS > 0:
                    in_window = in_window | (key < SINKS)[None, :]
                visible = visible & in_window
            scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(own_largest, tl.max(scores, 1) * scale)
        base = new_largest
        if IS_MASKED:
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        fade = tl.exp2(own_largest - base)
        own_sum = own_sum * fade + tl.sum(weights, 1)
        own_total = tl.dot(weights.to(values.dtype), values, own_total * fade[:, None], input_precision=PRECISION)
        own_largest = new_largest
        page = next_page
        if IS_JOINED:
            segment = _segment_of(_key_at(start, skipped, SINK_END), BLOCK_N)
            next_segment = _segment_of(_key_at(start + BLOCK_N, skipped, SINK_END), BLOCK_N)
            if (start + BLOCK_N >= high) | (segment != next_segment):
                largest, weight_sum, total = _join(largest, weight_sum, total, own_largest, own_sum, own_total)
                own_largest = tl.full(own_largest.shape, float("-inf"), tl.float32)
                own_sum = tl.zeros(own_sum.shape, tl.float32)
                own_total = tl.zeros(own_total.shape, tl.float32)
    return largest, weight_sum, total, own_largest, own_sum, own_total


@triton.jit
def _attend_keys(
    low, high, lowest, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
    BLOCK_M: tl.constexpr, IS_JOINED: tl.constexpr, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Result of the keys at places from ``low`` until ``high``: of all their segments, or of the one that they are."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    own_largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    own_sum = tl.zeros([BLOCK_M], tl.float32)
    own_total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    masked_from = low
    if not HAS_WINDOW:
        masked_from = low + tl.maximum(tl.minimum(lowest + 1, high) - low, 0) // BLOCK_N * BLOCK_N
        largest, weight_sum, total, own_largest, own_sum, own_total = _attend_span(
            low, masked_from, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
            largest, weight_sum, total, own_largest, own_sum, own_total,
            False, IS_JOINED, False, SINKS, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, STAGES,
        )  # fmt: skip
    largest, weight_sum, total, own_largest, own_sum, own_total = _attend_span(
        masked_from, high, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
        largest, weight_sum, total, own_largest, own_sum, own_total,
        True, IS_JOINED, HAS_WINDOW, SINKS, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, STAGES,
    )  # fmt: skip
    if IS_JOINED:
        return largest, weight_sum, total
    return own_largest, own_sum, own_total


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
    query_stride,
    scale,  # includes log2(e)
    window,
    num_parts,
    slots,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
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
    # Past the first-level cache, which does not see what other processors wrote.
    field = schedule_ptr + tl.program_id(1)
    num_queries = tl.load(field, cache_modifier=".cg")
    first_query = tl.load(field + num_parts, cache_modifier=".cg")
    first_position = tl.load(field + 2 * num_parts, cache_modifier=".cg")
    first_page = tl.load(field + 3 * num_parts, cache_modifier=".cg")
    tile = tl.load(field + 4 * num_parts, cache_modifier=".cg")
    part = tl.load(field + 5 * num_parts, cache_modifier=".cg")
    num_cuts = tl.load(field + 6 * num_parts, cache_modifier=".cg")
    cut_tile = tl.load(field + 7 * num_parts, cache_modifier=".cg")
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
    lowest = first_position + tile * BLOCK_M // GROUP
    highest = first_position + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    first = _first_key(lowest, window, HAS_WINDOW, BLOCK_N)
    if PDL:
        gdc_wait()
    place = (first_query + query).to(tl.int64)[:, None] * query_stride
    place += (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(query_ptr + place, mask=inside, other=0.0)
    if num_cuts == 1:
        skipped = 0
        low = first
        if SINK_END > 0:
            skipped = tl.maximum(first - SINK_END, 0)
            low = 0
        largest, weight_sum, total = _attend_keys(
            low, highest + 1 - skipped, lowest, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
            BLOCK_M, True, HAS_WINDOW, SINKS, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, STAGES,
        )  # fmt: skip
        out = (first_query + query).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM)
        out += (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_ptr + out, (total / weight_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        return

    # The segments that begin in this part's share of the keys; sinks are never cut.
    first_segment = _segment_of(first, BLOCK_N)
    end_segment = _segment_of(highest, BLOCK_N) + 1
    share = tl.cdiv(tl.cdiv(highest + 1 - first, BLOCK_N), num_cuts) * BLOCK_N
    begin = tl.maximum(_segment_from(first + part * share, BLOCK_N), first_segment + (part > 0))
    begin = tl.where(part == 0, first_segment, begin)
    end = tl.maximum(_segment_from(first + (part + 1) * share, BLOCK_N), first_segment + 1)
    i = tl.arange(0, BLOCK_M)
    slot = (kv_head * slots + first_slot).to(tl.int64)
    for segment in range(begin, tl.minimum(end, end_segment)):
        largest, weight_sum, total = _attend_keys(
            tl.maximum(_segment_start(segment, BLOCK_N), first),
            tl.minimum(_segment_start(segment + 1, BLOCK_N), highest + 1),
            lowest, 0, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
            BLOCK_M, False, HAS_WINDOW, 0, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, STAGES,
        )  # fmt: skip
        own_slot = slot + segment - first_segment
        tl.store(sums_ptr + own_slot * SLOT_SIZE + i[:, None] * BLOCK_D + d[None, :], total, mask=inside)
        tl.store(stats_ptr + own_slot * 2 * SLOT_M + i, largest, mask=i < SLOT_M)
        tl.store(stats_ptr + own_slot * 2 * SLOT_M + SLOT_M + i, weight_sum, mask=i < SLOT_M)
    tl.debug_barrier()  # all of this program's stores come before its count
    counter = counters_ptr + cut_tile * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_cuts - 1:
        tl.store(counter, 0)
        _join_slots(
            out_ptr, sums_ptr + slot * SLOT_SIZE, stats_ptr + slot * 2 * SLOT_M, end_segment - first_segment,
            first_query, num_queries, tile * BLOCK_M, kv_head,
            GROUP, NUM_KV_HEADS, HEAD_DIM, SLOT_M, BLOCK_D, UNROLLED,
        )  # fmt: skip


@triton.jit
def _join_slots(
    out_ptr, sums_ptr, stats_ptr, num_segments, first_query, num_queries, first_m, kv_head,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOT_M: tl.constexpr,
    BLOCK_D: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile from what its segments have left in memory."""
    i = tl.arange(0, SLOT_M)
    d = tl.arange(0, BLOCK_D)
    m = first_m + i
    inside = (m // GROUP < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    largest = tl.full([SLOT_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([SLOT_M], tl.float32)
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
            largest, weight_sum, total = _join(largest, weight_sum, total, next_largest, next_sum, next_total)
    out = (first_query + m // GROUP).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    out += (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out, (total / weight_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class SegmentTiling:
    """Tiles of a launch. ``block_n`` fixes the order of sums; the other sizes do not change a bit."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_processor: int = 2
    """Programs of a processor among which the keys of a batch are divided."""
    slots_per_part: int = 4
    """Segments for whose results there is memory, for each part of the budget."""


def choose_segment_tiling(num_rows: int, max_queries: int, group: int, head_dim: int) -> SegmentTiling:
    """Tiles for a batch of up to ``num_rows`` with up to ``max_queries`` each."""
    if head_dim > _WIDEST:
        return _WIDE
    if max_queries * group > 2 * _SMALL.block_m:
        return _LARGE
    return _ALONE if num_rows == 1 else _SMALL


_WIDEST = 128
_SMALL = SegmentTiling(64, 64, 4, 3)
_ALONE = replace(_SMALL, per_processor=4)
_LARGE = SegmentTiling(128, 64, 8, 3, per_processor=1, slots_per_part=2)
_WIDE = SegmentTiling(64, 64, 8, 2)


@dataclass(frozen=True, slots=True)
class _Division:
    """Division of a batch's keys over programs, for each KV head."""

    budget: int
    num_parts: int
    slots: int

    @classmethod
    def of(cls, plan: DevicePlan, tiling: SegmentTiling, num_tokens: int, group: int, num_kv_heads: int) -> _Division:
        rows = plan.rows
        num_rows = rows.context_lengths.shape[0]
        processors = num_processors(rows.context_lengths.device)
        budget = max(1, tiling.per_processor * processors // num_kv_heads)
        tiles_of_row = -(-rows.max_queries * group // tiling.block_m)
        num_tiles = min(num_rows * tiles_of_row, num_tokens * group // tiling.block_m + num_rows)
        return cls(budget, budget + budget // 3 + 1 + num_tiles, tiling.slots_per_part * budget)


def scheduled_segments(
    plan: DevicePlan, *, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int,
    tiling: SegmentTiling | None = None,
) -> DevicePlan:  # fmt: skip
    """The plan with the schedule that ``attend_segments`` reads: of each part its row's queries, first query, first
    position and first page, its tile, its number and how many there are, and the tile's counter and first slot.
    """
    rows, group = plan.rows, num_heads // num_kv_heads
    num_rows = rows.context_lengths.shape[0]
    if plan.schedule is not None or not num_rows or not num_tokens:
        return plan
    tiling = tiling or choose_segment_tiling(num_rows, rows.max_queries, group, head_dim)
    division = _Division.of(plan, tiling, num_tokens, group, num_kv_heads)
    schedule = torch.empty(_FIELDS, division.num_parts, dtype=torch.int32, device=rows.context_lengths.device)
    _segment_schedule_kernel[(triton.cdiv(division.num_parts, _SCHEDULED),)](
        rows.query_starts, rows.context_lengths, rows.page_starts, schedule, num_rows, division.num_parts,
        plan.window or 0, division.budget, division.slots,
        GROUP=group, HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)), PARTS=_SCHEDULED,
        **launch_options(schedule),
    )  # fmt: skip
    return replace(plan, schedule=schedule)


def attend_segments(
    query: torch.Tensor, kv: torch.Tensor, plan: DevicePlan, *, tiling: SegmentTiling | None = None
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over ``kv`` [S, 2, H_kv, D]; returns [T, H, D], of which rows of no query are left
    unwritten. A given ``tiling`` must be that of the plan's schedule.
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
    division = _Division.of(plan, tiling, num_tokens, group, num_kv_heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    slot_m = min(tiling.block_m, triton.next_power_of_2(plan.rows.max_queries * group))
    slots = num_kv_heads * division.slots * slot_m
    sums = torch.empty(slots * block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(2 * slots, dtype=torch.float32, device=query.device)
    _attend_segments_kernel[(num_kv_heads, division.num_parts)](
        query, kv, out, plan.rows.pages, plan.schedule, sums, stats, plan.rows.counters,
        query.stride(0), head_dim**-0.5 * _LOG2_E, plan.window or 0, division.num_parts, division.slots,
        PAGE_SIZE=plan.page_size, GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, BLOCK_M=tiling.block_m, SLOT_M=slot_m,
        BLOCK_N=tiling.block_n, BLOCK_D=block_d, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        STAGES=tiling.num_stages, UNROLLED=max(2, min(16, _FETCHED_ROWS // slot_m)), num_warps=tiling.num_warps,
        enable_fp_fusion=False, **launch_options(query),
    )  # fmt: skip
    return out
