# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Schedule of batch-invariant attention: which segments of which row's keys each program attends.

Worked out on the device, once a forward and for each window size. Programs share the keys in parts of about equal
length. A part is a run of whole segments, so what a part is does not change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from outrider.kernels.launching import launch_options, num_processors
from outrider.kernels.paged_attention.device_plan import DevicePlan
from outrider.kernels.paged_attention.schedule import num_shares, part_starts, pick, publish, store_rows
from outrider.kernels.paged_attention.segments import first_key_of, segment_of

_FIELDS = 9
_SCHEDULED = 32
"""Parts that one program of the schedule works out."""
_FEWEST_ROWS = 32
"""Looked through at once."""
_FEW_QUERIES = 8
"""Number of a row's queries up to which most drafts are scored."""


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
    first = first_key_of(contexts - counts, window, HAS_WINDOW, BLOCK_N)
    blocks = tl.cdiv(contexts - first, BLOCK_N)
    segments = segment_of(tl.maximum(contexts - 1, 0), BLOCK_N) - segment_of(first, BLOCK_N) + 1
    cuts = tl.maximum(tl.minimum(num_shares(blocks, tl.sum(tiles * blocks), budget), segments), 1)
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
    starts = part_starts(parts, is_cut)

    p = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    is_own = (p[:, None] >= starts[None, :]) & (p[:, None] < (starts + parts)[None, :])
    within = p - pick(is_own, starts)
    own_cuts = tl.maximum(pick(is_own, cuts), 1)
    # The last tiles of a prompt see most keys, and begin first.
    tile = tl.maximum(pick(is_own, tiles) - 1 - within // own_cuts, 0)
    page_starts = tl.load(page_starts_ptr + r, mask=is_row, other=0)
    field, exists = schedule_ptr + p, p < num_parts
    store_rows(field, num_parts, exists, is_own, counts, first_queries, contexts, page_starts)
    tl.store(field + 4 * num_parts, tile, mask=exists)
    tl.store(field + 5 * num_parts, within % own_cuts, mask=exists)
    tl.store(field + 6 * num_parts, own_cuts, mask=exists)
    tl.store(field + 7 * num_parts, pick(is_own, counters) + tile, mask=exists)
    tl.store(field + 8 * num_parts, pick(is_own, first_slots) + tile * pick(is_own, segments), mask=exists)
    if PDL:
        publish(p)


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
    folded = max_queries * group
    if head_dim > _WIDEST:
        return _WIDE if head_dim <= 2 * _WIDEST else _WIDEST_OF_ALL
    if folded > 2 * _SMALL.block_m:
        return _LARGE
    few = next((tiling for tiling in (_FEW, _SOME) if folded <= tiling.block_m), _SMALL)
    if num_rows == 1:
        return _ALONE if few is _SMALL else replace(few, num_stages=2)
    return replace(few, num_stages=2) if few is _FEW and num_rows > _FEW_ROWS else few


_WIDEST = 128
_FEW_ROWS = 32
_FEW = SegmentTiling(16, 64, 4, 4)
_SOME = SegmentTiling(32, 64, 4, 3)
_SMALL = SegmentTiling(64, 64, 4, 3)
_ALONE = replace(_SMALL, per_processor=4)
_LARGE = SegmentTiling(128, 64, 8, 3, per_processor=1, slots_per_part=2)
_WIDE = SegmentTiling(64, 64, 8, 2)
_WIDEST_OF_ALL = SegmentTiling(32, 32, 8, 2)


def rows_of_slot(max_queries: int, group: int, tiling: SegmentTiling) -> int:
    """Rows of a tile for which a segment's results have memory: of few values, since each takes a kernel of its own."""
    queries = 1 if max_queries == 1 else max(max_queries, _FEW_QUERIES)
    return min(tiling.block_m, int(triton.next_power_of_2(queries * group)))


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a batch's keys over programs, for each KV head."""

    budget: int
    """Parts of about equal length."""
    num_parts: int
    """Bound on the number of parts, tiles that are left whole included."""
    slots: int
    """Segments of cut tiles for whose results there is memory."""

    @classmethod
    def of(cls, plan: DevicePlan, tiling: SegmentTiling, num_tokens: int, group: int, num_kv_heads: int) -> Division:
        """Division for any batch of the plan's shape."""
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
    division = Division.of(plan, tiling, num_tokens, group, num_kv_heads)
    schedule = torch.empty(_FIELDS, division.num_parts, dtype=torch.int32, device=rows.context_lengths.device)
    _segment_schedule_kernel[(triton.cdiv(division.num_parts, _SCHEDULED),)](
        rows.query_starts, rows.context_lengths, rows.page_starts, schedule, num_rows, division.num_parts,
        plan.window or 0, division.budget, division.slots,
        GROUP=group, HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)), PARTS=_SCHEDULED,
        **launch_options(schedule),
    )  # fmt: skip
    return replace(plan, schedule=schedule)
