# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``paged_attention`` of decoding batches as one Triton kernel, with an online softmax.

The queries of a row and the query heads of a KV head are folded into the rows of one tile, so keys are read once for
all of them. The keys of the batch are cut into parts of about equal length (flash-decoding: Dao et al., 2023); every
part of a cut tile leaves its unnormalised sum in memory, and the program that finishes last, as a counter tells, adds
them up in their order. The counter is left at zero. Which part is a program's own is read from the ``schedule``; of one
row alone a program works it out by itself.

Before it waits for the kernel ahead of it, a program reads the plan and begins to fetch its first keys and values: both
are older than the forward's first kernel, but for the keys and values of its own tokens, which are read after.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from outrider.kernels.launching import launch_options, num_processors
from outrider.kernels.paged_attention.device_plan import AttentionTiling, DevicePlan, KeySharing, share_keys
from outrider.kernels.paged_attention.schedule import make_schedule, num_shares, read_part
from outrider.kernels.paged_attention.tiles import attend_tile
from outrider.kernels.room import empty_rows

_LOG2_E = 1.4426950408889634
_UNROLLED = 4
"""Parts that are added up at once."""


@triton.jit
def _part_of_row(
    query_starts_ptr, context_lengths_ptr, page_starts_ptr, number, window, budget,
    GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fields that ``read_part`` returns, where there is one row: without a schedule."""
    first_query = tl.load(query_starts_ptr)
    num_queries = tl.load(query_starts_ptr + 1) - first_query
    context = tl.load(context_lengths_ptr)
    first_page = tl.load(page_starts_ptr)
    seen = context
    if HAS_WINDOW:
        seen = tl.minimum(context, SINKS + window + num_queries - 1)
    num_tiles = tl.cdiv(num_queries * GROUP, BLOCK_M)
    blocks = tl.cdiv(seen, BLOCK_N)
    num_cuts = tl.maximum(num_shares(blocks, num_tiles * blocks, budget), 1)
    tile = number // num_cuts
    return num_queries, first_query, context - num_queries, first_page, tile, number % num_cuts, num_cuts, tile


@triton.jit(
    do_not_specialize=["window", "num_parts", "budget", "slots"],
    # Read number by number from wherever they lie: no kernel of its own for each alignment.
    do_not_specialize_on_alignment=[
        "query_starts_ptr",
        "context_lengths_ptr",
        "page_starts_ptr",
        "pages_ptr",
        "schedule_ptr",
    ],
)
def _attend_kernel(
    query_ptr,  # [T, H, D], rows query_stride apart
    kv_ptr,  # [S, 2, H_kv, D]
    out_ptr,  # [T, H, D]
    query_starts_ptr,  # [2], of one row
    context_lengths_ptr,  # [1]
    page_starts_ptr,  # [2]
    pages_ptr,
    schedule_ptr,  # [NUM_SCHEDULE_FIELDS, P], of several rows
    sums_ptr,  # [H_kv, slots, BLOCK_M, BLOCK_D] float32
    stats_ptr,  # [H_kv, slots, 2, BLOCK_M] float32: the largest score and the sum of weights
    counters_ptr,  # [cut tiles, H_kv]
    sink_logits_ptr,  # [H] float32; None: no sinks
    query_stride,
    scale,  # includes log2(e)
    value_scale,  # None: 1
    window,
    num_parts,
    budget,
    slots,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_SCHEDULED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    number = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    if IS_SCHEDULED:
        num_queries, first_query, first_position, first_page, tile, part, num_cuts, cut_tile = read_part(
            schedule_ptr + number, num_parts
        )
    else:
        num_queries, first_query, first_position, first_page, tile, part, num_cuts, cut_tile = _part_of_row(
            query_starts_ptr, context_lengths_ptr, page_starts_ptr, number, window, budget,
            GROUP, HAS_WINDOW, SINKS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    attend_tile(
        query_ptr, kv_ptr, out_ptr, sums_ptr, stats_ptr, counters_ptr, pages_ptr + first_page, sink_logits_ptr,
        query_stride, scale, value_scale, window, first_query, num_queries, first_position, kv_head, tile, part,
        num_cuts, kv_head * slots + number - part, cut_tile * NUM_KV_HEADS + kv_head,
        PAGE_SIZE, GROUP, NUM_KV_HEADS, HEAD_DIM, HAS_WINDOW, SINKS, SOFTCAP, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_M, False,
        STAGES, UNROLLED, PRECISION, PDL,
    )  # fmt: skip


def scheduled(
    plan: DevicePlan, *, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DevicePlan:
    """The plan with the schedule that ``paged_attention`` reads; one row needs none."""
    if plan.schedule is not None or plan.rows.context_lengths.shape[0] < 2 or not num_tokens:
        return plan
    sharing = _sharing(plan, num_tokens, num_heads, num_kv_heads, head_dim, dtype)
    return replace(plan, schedule=make_schedule(plan, sharing, num_heads // num_kv_heads))


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    plan: DevicePlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    value_scale: float | None = None,
    tiling: AttentionTiling | None = None,
    budget: int | None = None,
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over ``kv`` [S, 2, H_kv, D], with ``sink_logits`` [H] float32 or None; returns
    [T, H, D], of which rows of no query are left unwritten. Each KV head's keys are cut into about ``budget`` parts;
    this and ``tiling`` are chosen unless they are given, as they must be where the plan was ``scheduled``.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    out = empty_rows(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    rows = plan.rows
    num_rows, group = rows.context_lengths.shape[0], num_heads // num_kv_heads
    if not num_tokens or not num_rows:
        return out
    sharing = _sharing(plan, num_tokens, num_heads, num_kv_heads, head_dim, query.dtype, tiling, budget)
    schedule = plan.schedule
    if schedule is None:
        schedule = make_schedule(plan, sharing, group) if num_rows > 1 else rows.query_starts
    tiling, slots = sharing.tiling, sharing.num_slots
    block_d = max(16, triton.next_power_of_2(head_dim))
    sums = torch.empty(num_kv_heads * slots * tiling.block_m * block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(num_kv_heads * slots * 2 * tiling.block_m, dtype=torch.float32, device=query.device)
    _attend_kernel[(num_kv_heads, sharing.num_parts)](
        query, kv, out, rows.query_starts, rows.context_lengths, rows.page_starts, rows.pages, schedule, sums, stats,
        rows.counters, sink_logits, query.stride(0), (scale or head_dim**-0.5) * _LOG2_E, value_scale,
        plan.window or 0, sharing.num_parts, sharing.budget, slots,
        PAGE_SIZE=plan.page_size, GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HAS_WINDOW=plan.window is not None, SINKS=plan.num_sinks, SOFTCAP=softcap or 0.0,
        IS_SCHEDULED=num_rows > 1, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=block_d,
        STAGES=tiling.num_stages, PRECISION="ieee" if query.dtype == torch.float32 else "tf32", UNROLLED=_UNROLLED,
        num_warps=tiling.num_warps, **launch_options(query),
    )  # fmt: skip
    return out


def _sharing(
    plan: DevicePlan,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tiling: AttentionTiling | None = None,
    budget: int | None = None,
) -> KeySharing:
    return share_keys(
        plan.rows,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        num_processors=num_processors(plan.rows.context_lengths.device),
        tiling=tiling,
        budget=budget,
    )
