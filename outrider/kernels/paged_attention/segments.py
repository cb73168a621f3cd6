# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Segments of keys: device functions of batch-invariant attention.

Keys are attended in blocks of fixed positions, and blocks belong to segments of fixed positions: two blocks long at
first, and longer further on, sixteen to each doubling of the position. Inside a segment an online softmax goes from
block to block. The segments' results are joined from the first to the last.

Weights are added up in eights, which no tile's layout divides among warps, and then in pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.paged_attention.tiles import capped, fetch_lines, is_visible, key_places, keys_at, load_block

_BLOCKS_OF_FIRST_SEGMENTS = tl.constexpr(2)
_IN_A_WARP = tl.constexpr(8)
"""Neighbouring keys whose weights are in one warp, in the same registers and lanes for any tile."""


@triton.jit
def segment_of(key, BLOCK_N: tl.constexpr):
    """Number of the segment of a key: its position in units of the first segments, as a float with four bits."""
    unit = key // (BLOCK_N * _BLOCKS_OF_FIRST_SEGMENTS)
    exponent = (tl.maximum(unit, 16).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 131
    return exponent * 16 + (unit >> exponent)


@triton.jit
def segment_start(segment, BLOCK_N: tl.constexpr):
    """First key of a segment."""
    exponent = tl.maximum(segment // 16 - 1, 0)
    return ((segment - exponent * 16) << exponent) * (BLOCK_N * _BLOCKS_OF_FIRST_SEGMENTS)


@triton.jit
def segment_from(key, BLOCK_N: tl.constexpr):
    """Number of the first segment that begins at a key or after it."""
    return tl.where(key > 0, segment_of(tl.maximum(key - 1, 0), BLOCK_N) + 1, 0)


@triton.jit
def first_key_of(first_position, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key of the block from which on queries from ``first_position`` on see keys, sinks apart."""
    if HAS_WINDOW:
        return tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    return first_position * 0


@triton.jit
def fetch_block(
    first, last, page_ptr, kv_ptr, kv_head,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Prefetch the keys and values of a block of positions from ``first`` on, up to ``last``."""
    key = tl.minimum(first + tl.arange(0, BLOCK_N), last)
    slot = tl.load(page_ptr + key // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    token = slot * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    fetch_lines(kv_ptr + token, NUM_KV_HEADS, HEAD_DIM, BLOCK_D)


@triton.jit
def join_segments(largest, weight_sum, total, next_largest, next_sum, next_total):
    """The next segment's result added to that of the segments before it."""
    new_largest = tl.maximum(largest, next_largest)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    fade, scale = tl.exp2(largest - base), tl.exp2(next_largest - base)
    weight_sum = weight_sum * fade + next_sum * scale
    total = total * fade[:, None] + next_total * scale[:, None]
    return new_largest, weight_sum, total


@triton.jit
def _sum_weights(weights):
    """Sum of each row of weights [M, N]; N is 64, or 16 in the interpreter."""
    rows: tl.constexpr = weights.shape[0]
    groups: tl.constexpr = weights.shape[1] // 2 // _IN_A_WARP
    halves = tl.sum(tl.reshape(weights, [rows, 2, groups, _IN_A_WARP]), 1)
    sums = tl.sum(halves, 2)  # [M, groups]
    if groups == 4:
        even, odd = tl.split(tl.reshape(sums, [rows, 2, 2]))
        total = _add_pair(even) + _add_pair(odd)
    else:
        tl.static_assert(groups == 1)
        total = tl.sum(sums, 1)
    return total


@triton.jit
def _add_pair(values):
    """Sum of the two columns of ``values`` [M, 2]."""
    first, second = tl.split(values)
    return first + second


@triton.jit
def _widened(numbers, queries, IS_COMPILED: tl.constexpr):
    """Keys or values in the type of the queries, which FP8 ones are not.

    For products of few rows the compiler takes columns in an order that follows the narrowest type that it sees an
    operand loaded with. It does not look past an instruction with side effects; this one has none but that.
    """
    wide = numbers.to(queries.dtype)
    if IS_COMPILED and numbers.dtype != queries.dtype:
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=wide.dtype, is_pure=False, pack=2)
    return wide


@triton.jit
def _attend_span(
    low, until, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
    largest, weight_sum, total, own_largest, own_sum, own_total,
    IS_MASKED: tl.constexpr, IS_JOINED: tl.constexpr, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, IS_COMPILED: tl.constexpr,
):  # fmt: skip
    """Attend the keys at places from ``low`` until ``until``; not masked, every query sees all of them. Joined, the
    ``own`` result of a segment goes to those before it where the segment ends; otherwise the span is of one segment.
    """
    SINK_END: tl.constexpr = (SINKS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    place = tl.maximum(tl.minimum(low + j, high - 1), 0)
    page = tl.load(page_ptr + keys_at(place, skipped, SINK_END) // PAGE_SIZE)
    for start in tl.range(low, until, BLOCK_N, num_stages=STAGES):
        # Pages are looked up a block ahead, so that keys are fetched while others are multiplied.
        place = tl.minimum(start + BLOCK_N + j, high - 1)
        next_page = tl.load(page_ptr + keys_at(place, skipped, SINK_END) // PAGE_SIZE)
        place = start + j
        key = keys_at(place, skipped, SINK_END)
        token = key_places(page, start, skipped, kv_head, SINK_END, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N)
        pointers = kv_ptr + token[:, None] + d[None, :]
        keys, values = load_block(pointers, place, high, IS_MASKED, NUM_KV_HEADS, HEAD_DIM, BLOCK_D)
        keys, values = _widened(keys, queries, IS_COMPILED), _widened(values, queries, IS_COMPILED)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = capped(scores, scale, SOFTCAP)
        if IS_MASKED:
            visible = is_visible(place, key, high, position, window, HAS_WINDOW, SINKS)
            scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(own_largest, tl.max(scores, 1) * scale)
        base = new_largest
        if IS_MASKED:
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        fade = tl.exp2(own_largest - base)
        own_sum = own_sum * fade + _sum_weights(weights)
        own_total = tl.dot(weights.to(values.dtype), values, own_total * fade[:, None], input_precision=PRECISION)
        own_largest = new_largest
        page = next_page
        if IS_JOINED:
            segment = segment_of(keys_at(start, skipped, SINK_END), BLOCK_N)
            next_segment = segment_of(keys_at(start + BLOCK_N, skipped, SINK_END), BLOCK_N)
            if (start + BLOCK_N >= high) | (segment != next_segment):
                largest, weight_sum, total = join_segments(largest, weight_sum, total, own_largest, own_sum, own_total)
                own_largest = tl.full(own_largest.shape, float("-inf"), tl.float32)
                own_sum = tl.zeros(own_sum.shape, tl.float32)
                own_total = tl.zeros(own_total.shape, tl.float32)
    return largest, weight_sum, total, own_largest, own_sum, own_total


@triton.jit
def attend_keys(
    low, high, lowest, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window, largest, weight_sum,
    BLOCK_M: tl.constexpr, IS_JOINED: tl.constexpr, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, IS_COMPILED: tl.constexpr,
):  # fmt: skip
    """Result of the keys at places from ``low`` until ``high``: of all their segments, joined to ``largest`` and
    ``weight_sum``, or of the one that they are.
    """
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
            False, IS_JOINED, False, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
            STAGES, IS_COMPILED,
        )  # fmt: skip
    largest, weight_sum, total, own_largest, own_sum, own_total = _attend_span(
        masked_from, high, high, skipped, page_ptr, kv_ptr, kv_head, queries, position, scale, window,
        largest, weight_sum, total, own_largest, own_sum, own_total,
        True, IS_JOINED, HAS_WINDOW, SINKS, SOFTCAP, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
        STAGES, IS_COMPILED,
    )  # fmt: skip
    if IS_JOINED:
        return largest, weight_sum, total
    return own_largest, own_sum, own_total
