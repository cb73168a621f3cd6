# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Split-KV schedule: which part of which row's keys each program of a decoding batch attends.

It is worked out on the device, once a forward and for each window size, from the lengths that are there; so one
captured graph serves every batch of its shape. The keys of a batch are cut into parts of about equal length, whatever
the spread of its contexts: one context of 120,000 tokens among short ones is spread over the whole device. A tile that
is not much longer than such a part is left whole. Parts of cut tiles come first, since they are the longest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.paged_attention.device_plan import NUM_SCHEDULE_FIELDS, DevicePlan, KeySharing

_PARTS = 32
"""Parts of one program."""
_FEWEST_ROWS = 32
"""Looked through at once."""


@triton.jit
def pick(is_own, values):
    """Value of each part's row."""
    return tl.sum(tl.where(is_own, values[None, :], 0), 1)


@triton.jit
def num_shares(blocks, total, budget):
    """Number of shares in a tile's ``blocks`` of keys, rounded, where ``budget`` programs share a ``total`` of them."""
    share = tl.maximum(tl.cdiv(total, budget), 1)
    return (blocks + share // 2) // share


@triton.jit
def part_starts(parts, is_cut):
    """First part of each row: parts of cut tiles come before those of whole ones."""
    cut = tl.where(is_cut, parts, 0)
    whole = parts - cut
    return tl.where(is_cut, tl.cumsum(cut) - cut, tl.sum(cut) + tl.cumsum(whole) - whole)


@triton.jit
def store_rows(field, num_parts, exists, is_own, counts, first_queries, contexts, page_starts):
    """Store the fields of parts that describe their rows."""
    tl.store(field, pick(is_own, counts), mask=exists)
    tl.store(field + num_parts, pick(is_own, first_queries), mask=exists)
    tl.store(field + 2 * num_parts, pick(is_own, contexts - counts), mask=exists)
    tl.store(field + 3 * num_parts, pick(is_own, page_starts), mask=exists)


@triton.jit
def publish(p):
    """Let the whole device see what was stored: attention reads the schedule before it waits. No kernel is placed
    before that of the schedule ends, which lets none ahead.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [p], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_part(field, num_parts):
    """A part's number of queries, first query, first position, first page, tile, number in the tile, number of the
    tile's parts, and the tile's number among those that are cut.
    """
    # Past the first-level cache, which does not see what other processors wrote.
    num_queries = tl.load(field, cache_modifier=".cg")
    first_query = tl.load(field + num_parts, cache_modifier=".cg")
    first_position = tl.load(field + 2 * num_parts, cache_modifier=".cg")
    first_page = tl.load(field + 3 * num_parts, cache_modifier=".cg")
    tile = tl.load(field + 4 * num_parts, cache_modifier=".cg")
    part = tl.load(field + 5 * num_parts, cache_modifier=".cg")
    num_cuts = tl.load(field + 6 * num_parts, cache_modifier=".cg")
    cut_tile = tl.load(field + 7 * num_parts, cache_modifier=".cg")
    return num_queries, first_query, first_position, first_page, tile, part, num_cuts, cut_tile


@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "window", "budget"],
    # Read number by number from wherever they lie: no kernel of its own for each alignment.
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lengths_ptr", "page_starts_ptr"],
)
def _schedule_kernel(
    query_starts_ptr,  # [B+1]
    context_lengths_ptr,  # [B]
    page_starts_ptr,  # [B+1]
    schedule_ptr,  # [NUM_SCHEDULE_FIELDS, P]
    num_rows,
    num_parts,
    window,
    budget,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    r = tl.arange(0, ROWS)
    is_row = r < num_rows
    first_queries = tl.load(query_starts_ptr + r, mask=is_row, other=0)
    counts = tl.load(query_starts_ptr + r + 1, mask=is_row, other=0) - first_queries
    contexts = tl.load(context_lengths_ptr + r, mask=is_row, other=0)
    seen = contexts
    if HAS_WINDOW:
        seen = tl.minimum(contexts, SINKS + window + counts - 1)
    tiles = tl.cdiv(counts * GROUP, BLOCK_M)
    blocks = tl.cdiv(seen, BLOCK_N)
    cuts = tl.maximum(num_shares(blocks, tl.sum(tiles * blocks), budget), 1)
    parts = tiles * cuts
    starts = part_starts(parts, cuts > 1)
    cut_tiles = tl.where(cuts > 1, tiles, 0)
    tiles_before = tl.cumsum(cut_tiles) - cut_tiles

    p = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    is_own = (p[:, None] >= starts[None, :]) & (p[:, None] < (starts + parts)[None, :])
    within = p - pick(is_own, starts)
    own_cuts = tl.maximum(pick(is_own, cuts), 1)
    page_starts = tl.load(page_starts_ptr + r, mask=is_row, other=0)
    field = schedule_ptr + p
    exists = p < num_parts
    store_rows(field, num_parts, exists, is_own, counts, first_queries, contexts, page_starts)
    tl.store(field + 4 * num_parts, within // own_cuts, mask=exists)
    tl.store(field + 5 * num_parts, within % own_cuts, mask=exists)
    tl.store(field + 6 * num_parts, own_cuts, mask=exists)
    tl.store(field + 7 * num_parts, pick(is_own, tiles_before) + within // own_cuts, mask=exists)
    if PDL:
        publish(p)


def make_schedule(plan: DevicePlan, sharing: KeySharing, group: int) -> torch.Tensor:
    """[NUM_SCHEDULE_FIELDS, P] int32: of each part its row's number of queries (0: there is no such part), first query,
    first query's position and first page, its tile, its number among the tile's parts and how many these are, and the
    tile's number among those that are cut. ``group`` query heads share a KV head.
    """
    rows = plan.rows
    num_rows = rows.context_lengths.shape[0]
    schedule = torch.empty(
        NUM_SCHEDULE_FIELDS, sharing.num_parts, dtype=torch.int32, device=rows.context_lengths.device
    )
    _schedule_kernel[(triton.cdiv(sharing.num_parts, _PARTS),)](
        rows.query_starts, rows.context_lengths, rows.page_starts, schedule, num_rows, sharing.num_parts,
        plan.window or 0, sharing.budget,
        GROUP=group, HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, BLOCK_M=sharing.tiling.block_m,
        BLOCK_N=sharing.tiling.block_n, ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)), PARTS=_PARTS,
        **launch_options(schedule),
    )  # fmt: skip
    return schedule
