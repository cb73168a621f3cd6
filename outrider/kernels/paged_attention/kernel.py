# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0912, PLR0915, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``paged_attention`` as one Triton kernel, with an online softmax.

The queries of a row and the query heads of a KV head are folded into the rows of one tile, so keys are read once for
all of them. When there are fewer tiles than the device can run, each row's context is cut into parts (flash-decoding:
Dao et al., 2023); every part leaves its unnormalised sum in memory, and the program that finishes last, as a counter
tells, adds them up. The counter is left at zero.

A launch knows its rows, or finds out how many are present: one of few rows with many queries then fills the device as
well as one of many rows with few. Finding out takes some microseconds, which decoding does not have to spare.

Before it waits for the kernel ahead of it, a program reads the plan and begins to fetch its first keys and values: both
are older than the forward's first kernel, but for the keys and values of its own tokens, which are read after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.fetching import fetch_ahead
from outrider.kernels.launching import launch_options, num_processors, shared_bytes
from outrider.kernels.paged_attention.device_plan import MAX_SPLITS, DevicePlan, choose_cut

_LOG2_E = 1.4426950408889634
_UNROLLED = 4
"""Parts that are added up at once."""
_FEWEST_ROWS = 16
"""Of a tile."""
_DEEP_STAGES, _BLOCKS_AHEAD = 5, 2
"""What Triton makes of so many stages, the first of which fetch pages."""
_OTHER_BYTES = 10 << 10
"""Of shared memory, besides keys and values."""
_EVEN = 0.9


@triton.jit(
    do_not_specialize=["num_splits", "window"],
    # Read number by number from wherever they lie: no kernel of its own for each alignment.
    do_not_specialize_on_alignment=[
        "query_starts_ptr",
        "context_lengths_ptr",
        "page_starts_ptr",
        "pages_ptr",
        "num_rows_ptr",
    ],
)
def _attend_kernel(
    query_ptr,  # [T, H, D], rows query_stride apart
    kv_ptr,  # [S, 2, H_kv, D]
    out_ptr,  # [T, H, D]
    query_starts_ptr,  # [B+1]
    context_lengths_ptr,  # [B]
    page_starts_ptr,  # [B+1]
    pages_ptr,
    num_rows_ptr,  # [1], where rows are found
    sums_ptr,  # [groups, splits, BLOCK_M, BLOCK_D] float32
    stats_ptr,  # [groups, splits, 2, BLOCK_M] float32: the largest score and the sum of weights
    counters_ptr,  # [groups]
    query_stride,
    scale,  # includes log2(e)
    window,
    num_splits,  # where rows are found: of all that are present, together
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FINDS_ROWS: tl.constexpr,
    NUM_TILES: tl.constexpr,  # of a row, where rows are found
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    if FINDS_ROWS:
        # The fewer rows are present of those that the launch could have, the more parts each context is cut into.
        num_rows = tl.load(num_rows_ptr)
        num_splits = tl.maximum(tl.minimum(num_splits // tl.maximum(num_rows * NUM_TILES, 1), MAX_SPLITS), 1)
        split = tl.program_id(2) % num_splits
        num_tiles = NUM_TILES
        tile = tl.program_id(2) // num_splits % num_tiles
        row = tl.program_id(2) // num_splits // num_tiles
        if row >= num_rows:
            return
    else:
        tile = tl.program_id(0) // num_splits
        split = tl.program_id(0) % num_splits
        num_tiles = tl.num_programs(0) // num_splits
        row = tl.program_id(2)
    first_query = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - first_query
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    first_position = tl.load(context_lengths_ptr + row) - num_queries
    page_ptr = pages_ptr + tl.load(page_starts_ptr + row)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // GROUP
    is_query = query < num_queries
    position = first_position + query
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM

    # The keys that any query of this tile sees, and this program's part of them.
    end = first_position + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1) + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position + (tile * BLOCK_M) // GROUP - window + 1, 0)
    part = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
    num_parts = tl.cdiv(end - begin, part)
    if split >= num_parts:
        return
    low = begin + split * part
    high = tl.minimum(low + part, end)

    if PDL:
        LINE: tl.constexpr = 128 // (kv_ptr.dtype.element_ty.primitive_bitwidth // 8)
        key = tl.minimum(low + tl.arange(0, BLOCK_N), high - 1)
        page = tl.load(page_ptr + key // PAGE_SIZE).to(tl.int64)
        token = (page * PAGE_SIZE + key % PAGE_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        line = tl.minimum(tl.arange(0, (BLOCK_D + LINE - 1) // LINE) * LINE, HEAD_DIM - 1)
        fetch_ahead(kv_ptr + token[:, None] + line[None, :])
        fetch_ahead(kv_ptr + token[:, None] + NUM_KV_HEADS * HEAD_DIM + line[None, :])
        gdc_wait()
    place = (first_query + query).to(tl.int64)[:, None] * query_stride
    place += (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    inside = is_query[:, None] & in_head[None, :]
    queries = tl.load(query_ptr + place, mask=inside, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        exists = key < high
        page = tl.load(page_ptr + key // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        token = (page * PAGE_SIZE + key % PAGE_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        keys = tl.load(kv_ptr + token[None, :] + d[:, None], mask=exists[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(largest - base)
        values = tl.load(
            kv_ptr + token[:, None] + NUM_KV_HEADS * HEAD_DIM + d[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        total = total * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        largest = new_largest

    out_place = (first_query + query).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    out_place += (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    if num_parts == 1:
        tl.store(out_ptr + out_place, (total / weight_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        group = (row * NUM_KV_HEADS + kv_head) * num_tiles + tile
        i = tl.arange(0, BLOCK_M)
        sums = sums_ptr + group.to(tl.int64) * num_splits * BLOCK_M * BLOCK_D + i[:, None] * BLOCK_D + d[None, :]
        stats = stats_ptr + group.to(tl.int64) * num_splits * 2 * BLOCK_M + i
        tl.store(sums + split * BLOCK_M * BLOCK_D, total, mask=inside)
        tl.store(stats + split * 2 * BLOCK_M, largest)
        tl.store(stats + split * 2 * BLOCK_M + BLOCK_M, weight_sum)
        tl.debug_barrier()  # all of this program's stores come before its count
        if tl.atomic_add(counters_ptr + group, 1, sem="acq_rel") == num_parts - 1:
            tl.store(counters_ptr + group, 0)
            # Loads go past the first-level cache, which does not see what other processors wrote, and several at once.
            largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for first in range(0, num_parts, UNROLLED):
                for step in tl.static_range(UNROLLED):
                    other = tl.minimum(first + step, num_parts - 1)
                    largest = tl.maximum(largest, tl.load(stats + other * 2 * BLOCK_M, cache_modifier=".cg"))
            base = tl.where(largest == float("-inf"), 0.0, largest)
            weight_sum = tl.zeros([BLOCK_M], tl.float32)
            total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for first in range(0, num_parts, UNROLLED):
                for step in tl.static_range(UNROLLED):
                    other = first + step
                    is_part = other < num_parts
                    their_stats = stats + other * 2 * BLOCK_M
                    their_largest = tl.load(their_stats, mask=is_part, other=float("-inf"), cache_modifier=".cg")
                    their_sum = tl.load(their_stats + BLOCK_M, mask=is_part, other=0.0, cache_modifier=".cg")
                    their_total = tl.load(
                        sums + other * BLOCK_M * BLOCK_D, mask=inside & is_part, other=0.0, cache_modifier=".cg"
                    )
                    fade = tl.exp2(their_largest - base)
                    weight_sum += their_sum * fade
                    total += their_total * fade[:, None]
            tl.store(out_ptr + out_place, (total / weight_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut up."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiling(num_rows: int, dtype: torch.dtype) -> Tiling:
    """``num_rows`` are those of the largest row's queries and grouped heads."""
    block_m = min(64, max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)))
    if dtype == torch.float32:
        return Tiling(min(block_m, 32), 32, 4, 2)
    return Tiling(block_m, 128 if block_m < 64 else 64, 4, 2)


def _deepened(tiling: Tiling, query: torch.Tensor, num_programs: int) -> Tiling:
    """Of programs that attend whole contexts for few rows: two blocks ahead, where that many programs still fill the
    device evenly, though fewer fit on a multiprocessor.
    """
    block_d = triton.next_power_of_2(query.shape[-1])
    num_bytes = _BLOCKS_AHEAD * 2 * tiling.block_n * block_d * query.dtype.itemsize + _OTHER_BYTES  # keys and values
    at_once = shared_bytes(query.device) // num_bytes * num_processors(query.device)
    is_small = tiling.block_m == _FEWEST_ROWS and query.dtype.itemsize == 2
    return replace(tiling, num_stages=_DEEP_STAGES) if is_small and _is_even(num_programs, at_once) else tiling


def _is_even(num_programs: int, at_once: int) -> bool:
    """Whether all run at once, or nearly always as many as can."""
    waves = triton.cdiv(num_programs, at_once) if at_once else 0
    return waves == 1 or (waves > 0 and num_programs >= _EVEN * waves * at_once)


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    plan: DevicePlan,
    *,
    tiling: Tiling | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over ``kv`` [S, 2, H_kv, D]; returns [T, H, D], of which rows of no query are left
    unwritten. ``tiling`` and ``splits``, into how many parts each context is cut if all rows are present, are chosen
    unless they are given.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    rows = plan.rows
    num_rows = rows.context_lengths.shape[0]
    if not num_tokens or not num_rows:
        return out
    folded = rows.max_queries * (num_heads // num_kv_heads)
    is_chosen, tiling = tiling is None, tiling or choose_tiling(folded, query.dtype)
    tiles = triton.cdiv(folded, tiling.block_m)
    cut = choose_cut(
        rows, num_tokens=num_tokens, num_kv_heads=num_kv_heads, num_tiles=tiles,
        num_processors=num_processors(query.device), splits=splits,
    )  # fmt: skip
    if is_chosen and cut.is_whole:
        tiling = _deepened(tiling, query, tiles * num_rows * num_kv_heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    sums = torch.empty(cut.num_parts * tiling.block_m * block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(cut.num_parts * 2 * tiling.block_m, dtype=torch.float32, device=query.device)
    _attend_kernel[cut.grid](
        query, kv, out, rows.query_starts, rows.context_lengths, rows.page_starts, rows.pages,
        rows.num_rows if cut.finds_rows else rows.query_starts, sums, stats, rows.counters, query.stride(0),
        head_dim**-0.5 * _LOG2_E, plan.window or 0, cut.num_splits,
        PAGE_SIZE=plan.page_size, GROUP=num_heads // num_kv_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HAS_WINDOW=plan.window is not None, FINDS_ROWS=cut.finds_rows, NUM_TILES=tiles if cut.finds_rows else 0,
        MAX_SPLITS=MAX_SPLITS, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=block_d,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", UNROLLED=_UNROLLED,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(query),
    )  # fmt: skip
    return out
