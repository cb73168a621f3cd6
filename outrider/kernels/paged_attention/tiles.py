# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Attention of one program over its part of a tile's keys: device functions of both attention kernels.

Owns the online softmax over blocks of keys, of which most need no mask, and the sum over a tile's parts. Refuses to
know how a batch is cut into tiles and parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from outrider.kernels.fetching import fetch_ahead


@triton.jit
def keys_at(place, skipped, SINKS: tl.constexpr):
    """Positions of the keys at some places of the sequence that is attended: all up to SINKS, then those after
    ``skipped`` that no query sees.
    """
    if SINKS > 0:
        return tl.where(place < SINKS, place, place + skipped)
    return place + skipped


@triton.jit
def capped(scores, scale, SOFTCAP: tl.constexpr):
    """Scores that, times ``scale``, which includes log2(e), are at most SOFTCAP: a tanh."""
    bound = SOFTCAP * 1.4426950408889634 / scale
    return bound - 2.0 * bound / (1.0 + tl.exp(2.0 * scores / bound))


@triton.jit
def first_state(sink_logits_ptr, kv_head, m, is_first, GROUP: tl.constexpr):
    """Largest score and sum of weights of the rows ``m`` of a tile before any key, both with log2(e): those of the
    heads' sink logits, which are in the first part of the keys alone; without sinks those of nothing.
    """
    largest = tl.full(m.shape, float("-inf"), tl.float32)
    weight_sum = tl.zeros(m.shape, tl.float32)
    if sink_logits_ptr is not None:
        sinks = tl.load(sink_logits_ptr + kv_head * GROUP + m % GROUP) * 1.4426950408889634
        largest = tl.where(is_first, sinks, largest)
        weight_sum += tl.where(is_first, 1.0, 0.0)
    return largest, weight_sum


@triton.jit
def store_mean(outs, total, weight_sum, value_scale, inside):
    """Store the outputs of attention, [M, D]: sums of values over those of their weights, times the scale if there is
    one.
    """
    mean = total / weight_sum[:, None]
    if value_scale is not None:
        mean *= value_scale
    tl.store(outs, mean.to(outs.dtype.element_ty), mask=inside)


@triton.jit
def places_of(m, first_query, kv_head, stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Places [M, D] of the rows ``m`` of a tile among queries or outputs whose tokens are ``stride`` apart."""
    token = (first_query + m // GROUP).to(tl.int64)[:, None] * stride
    return token + ((kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def positions_of(tile, first_position, num_queries, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Positions of the first and of the last query of a tile."""
    lowest = first_position + tile * BLOCK_M // GROUP
    return lowest, first_position + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)


@triton.jit
def load_block(
    pointers, place, high, IS_MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, BLOCK_D] of a block; masked, those at places from ``high`` on are 0."""
    d = tl.arange(0, BLOCK_D)
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
    return keys, values


@triton.jit
def is_visible(place, key, high, position, window, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr):
    """Mask [M, N] of the keys that the queries at ``position`` see, of those at places before ``high``."""
    visible = (place < high)[None, :] & (key[None, :] <= position[:, None])
    if HAS_WINDOW:
        in_window = key[None, :] > position[:, None] - window
        if SINKS > 0:
            in_window = in_window | (key < SINKS)[None, :]
        visible = visible & in_window
    return visible


@triton.jit
def fetch_lines(pointers, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetch the keys at ``pointers`` [N] and their values."""
    LINE: tl.constexpr = 128 // (pointers.dtype.element_ty.primitive_bitwidth // 8)
    line = tl.minimum(tl.arange(0, (BLOCK_D + LINE - 1) // LINE) * LINE, HEAD_DIM - 1)
    fetch_ahead(pointers[:, None] + line[None, :])
    fetch_ahead(pointers[:, None] + NUM_KV_HEADS * HEAD_DIM + line[None, :])


@triton.jit
def _pages_of(page_ptr, start, high, skipped, SINKS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of BLOCK_N keys; those past the last take its page."""
    place = tl.maximum(tl.minimum(start + tl.arange(0, BLOCK_N), high - 1), 0)
    return tl.load(page_ptr + keys_at(place, skipped, SINKS) // PAGE_SIZE)


@triton.jit
def key_places(
    page,  # [BLOCK_N]
    start,
    skipped,
    kv_head,
    SINKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Places in the cache of the BLOCK_N keys of some pages, those of the head."""
    key = keys_at(start + tl.arange(0, BLOCK_N), skipped, SINKS)
    slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    return slot * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM


@triton.jit
def _attend_block(
    start,
    high,
    skipped,
    page,  # [BLOCK_N]
    kv_ptr,
    kv_head,
    queries,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M]
    largest,
    weight_sum,
    total,
    scale,
    window,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in BLOCK_N keys; not masked, every query sees all of them."""
    place = start + tl.arange(0, BLOCK_N)
    key = keys_at(place, skipped, SINKS)
    token = key_places(page, start, skipped, kv_head, SINKS, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N)
    pointers = kv_ptr + token[:, None] + tl.arange(0, BLOCK_D)[None, :]
    keys, values = load_block(pointers, place, high, IS_MASKED, NUM_KV_HEADS, HEAD_DIM, BLOCK_D)
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)  # of FP8
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if SOFTCAP > 0:
        scores = capped(scores, scale, SOFTCAP)
    if IS_MASKED:
        visible = is_visible(place, key, high, position, window, HAS_WINDOW, SINKS)
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    base = new_largest
    if IS_MASKED:
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(largest - base)
    weight_sum = weight_sum * fade + tl.sum(weights, 1)
    total = tl.dot(weights.to(values.dtype), values, total * fade[:, None], input_precision=PRECISION)
    return new_largest, weight_sum, total


@triton.jit
def _attend_span(
    low,
    until,
    high,
    skipped,
    page_ptr,
    kv_ptr,
    kv_head,
    queries,
    position,
    largest,
    weight_sum,
    total,
    scale,
    window,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in the keys at places from ``low`` until ``until``. Pages are looked up a block ahead: were they looked up
    beside the keys, no key would be fetched while others are multiplied.
    """
    page = _pages_of(page_ptr, low, high, skipped, SINKS, PAGE_SIZE, BLOCK_N)
    for start in tl.range(low, until, BLOCK_N, num_stages=STAGES):
        next_page = _pages_of(page_ptr, start + BLOCK_N, high, skipped, SINKS, PAGE_SIZE, BLOCK_N)
        largest, weight_sum, total = _attend_block(
            start, high, skipped, page, kv_ptr, kv_head, queries, position, largest, weight_sum, total, scale, window,
            IS_MASKED, HAS_WINDOW, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        page = next_page
    return largest, weight_sum, total


@triton.jit
def _attend_part(
    low, high, lowest, highest, skipped, page_ptr, kv_ptr, kv_head, queries, position, largest, weight_sum, total,
    scale, window, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_LARGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the keys of a tile's part; a large tile masks none of those that all of its queries see."""
    masked_from = low
    if IS_LARGE:
        plain_from = low
        if HAS_WINDOW:  # keys that have left the last query's window
            unseen = tl.maximum(highest - window + 1 - skipped - low, 0)
            plain_from = tl.minimum(low + tl.cdiv(unseen, BLOCK_N) * BLOCK_N, high)
            largest, weight_sum, total = _attend_span(
                low, plain_from, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, largest, weight_sum,
                total, scale, window, True, True, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N,
                BLOCK_D, STAGES, PRECISION,
            )  # fmt: skip
        plain = tl.maximum(tl.minimum(lowest + 1 - skipped, high) - plain_from, 0)
        masked_from = plain_from + plain // BLOCK_N * BLOCK_N
        largest, weight_sum, total = _attend_span(
            plain_from, masked_from, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, largest,
            weight_sum, total, scale, window, False, False, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_N, BLOCK_D, STAGES, PRECISION,
        )  # fmt: skip
    largest, weight_sum, total = _attend_span(
        masked_from, high, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, largest, weight_sum, total,
        scale, window, True, HAS_WINDOW, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
        STAGES, PRECISION,
    )  # fmt: skip
    return largest, weight_sum, total


@triton.jit
def _join_parts(
    sums, stats, num_parts, inside, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SLOT_M: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """Sums of weights and of weighted values [BLOCK_M, BLOCK_D] of all parts of a tile."""
    # Past the first-level cache, which does not see what other processors wrote.
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for other in range(num_parts):
        largest = tl.maximum(largest, tl.load(stats + other * 2 * SLOT_M, cache_modifier=".cg"))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, num_parts, UNROLLED):
        for step in tl.static_range(UNROLLED):
            other = first + step
            is_part = other < num_parts
            theirs = stats + other * 2 * SLOT_M
            their_largest = tl.load(theirs, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            their_sum = tl.load(theirs + SLOT_M, mask=is_part, other=0.0, cache_modifier=".cg")
            their_total = tl.load(
                sums + other * SLOT_M * BLOCK_D, mask=inside & is_part, other=0.0, cache_modifier=".cg"
            )
            fade = tl.exp2(their_largest - base)
            weight_sum += their_sum * fade
            total += their_total * fade[:, None]
    return weight_sum, total


@triton.jit
def attend_tile(
    query_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, counters_ptr, page_ptr, sink_logits_ptr, query_stride, scale,
    value_scale, window, first_query, num_queries, first_position, kv_head, tile, part_of_tile, num_cuts, slot, counter,
    PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLOT_M: tl.constexpr, IS_LARGE: tl.constexpr,
    STAGES: tl.constexpr, UNROLLED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one tile; the last to finish writes the tile's outputs."""
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // GROUP
    is_query = query < num_queries
    position = first_position + query
    d = tl.arange(0, BLOCK_D)
    inside = is_query[:, None] & (d < HEAD_DIM)[None, :]

    # The keys that any query of this tile sees, without those between the sinks and the first query's window, and this
    # program's part of them.
    lowest, highest = positions_of(tile, first_position, num_queries, GROUP, BLOCK_M)
    skipped = 0
    if HAS_WINDOW:
        skipped = tl.maximum(lowest - window + 1 - SINKS, 0)
    end = highest + 1 - skipped
    part = tl.cdiv(tl.cdiv(end, num_cuts), BLOCK_N) * BLOCK_N
    num_parts = tl.cdiv(end, part)
    low = part_of_tile * part
    high = tl.minimum(low + part, end)
    if part_of_tile < num_parts:
        if PDL:
            page = _pages_of(page_ptr, low, high, skipped, SINKS, PAGE_SIZE, BLOCK_N)
            token = key_places(page, low, skipped, kv_head, SINKS, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N)
            fetch_lines(kv_ptr + token, NUM_KV_HEADS, HEAD_DIM, BLOCK_D)
            gdc_wait()
        place = places_of(m, first_query, kv_head, query_stride, GROUP, HEAD_DIM, BLOCK_D)
        queries = tl.load(query_ptr + place, mask=inside, other=0.0)
        largest, weight_sum = first_state(sink_logits_ptr, kv_head, m, part_of_tile == 0, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest, weight_sum, total = _attend_part(
            low, high, lowest, highest, skipped, page_ptr, kv_ptr, kv_head, queries, position, largest, weight_sum,
            total, scale, window, HAS_WINDOW, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
            IS_LARGE, STAGES, PRECISION,
        )  # fmt: skip

        place = places_of(m, first_query, kv_head, NUM_KV_HEADS * GROUP * HEAD_DIM, GROUP, HEAD_DIM, BLOCK_D)
        if num_parts == 1:
            store_mean(out_ptr + place, total, weight_sum, value_scale, inside)
        else:
            i = tl.arange(0, BLOCK_M)
            # The slots of a tile's parts are neighbours among those of one head.
            sums = sums_ptr + slot.to(tl.int64) * SLOT_M * BLOCK_D + i[:, None] * BLOCK_D + d[None, :]
            stats = stats_ptr + slot.to(tl.int64) * 2 * SLOT_M + i
            tl.store(sums + part_of_tile * SLOT_M * BLOCK_D, total, mask=inside)
            tl.store(stats + part_of_tile * 2 * SLOT_M, largest)
            tl.store(stats + part_of_tile * 2 * SLOT_M + SLOT_M, weight_sum)
            tl.debug_barrier()  # all of this program's stores come before its count
            if tl.atomic_add(counters_ptr + counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counters_ptr + counter, 0)
                weight_sum, total = _join_parts(sums, stats, num_parts, inside, BLOCK_M, BLOCK_D, SLOT_M, UNROLLED)
                store_mean(out_ptr + place, total, weight_sum, value_scale, inside)
