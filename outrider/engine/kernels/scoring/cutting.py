# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Where min-p, top-k and top-p cut a row: kernels that find the least logit that stays, without sorting the row.

The largest logit of each run of 128 neighbours says about where the best few thousand logits begin. Whatever lies from
there on is gathered, and the exact place is searched for among those, by the bits of the logits. That the gathered are
enough is checked, not assumed: where they are not (probabilities so flat that top-p wants more), the row is marked.
Masses are integers, so that the order in which logits were gathered changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.kernels.scoring.device_functions import (
    GROUP,
    LAST,
    LEAST,
    NOTHING,
    SHORT,
    UNWANTED,
    bounded,
    group_ids,
    group_logits,
    limit_of,
    row_start,
    scale_of,
    wanted,
    word,
)
from outrider.engine.kernels.scoring.rows import Column, Wish

RUN_SIZE = 128
RUNS_PER_GROUP = tl.constexpr(GROUP.value // RUN_SIZE)
_WISHES = tl.constexpr(int(Column.WISHES))
_MIN_P = tl.constexpr(int(Column.MIN_P))
_TOP_K = tl.constexpr(int(Column.TOP_K))
_TOP_P_LOW = tl.constexpr(int(Column.TOP_P_LOW))
_TOP_P_HIGH = tl.constexpr(int(Column.TOP_P_HIGH))
_CUTS = tl.constexpr(int(Wish.CUTS))
_RUN = tl.constexpr(RUN_SIZE)
_WHOLE = tl.constexpr(2.0**40)
"""The mass of the likeliest token."""
_SHARE = tl.constexpr(0.8)
"""Of runs that are gathered from: some 1.6 logits of each, if logits do not know of their neighbours."""


@triton.jit
def _rank(values, BITS: tl.constexpr):
    """Numbers in the order of the floats; ``BITS`` of them differ: 16 where the floats were bfloat16."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return ranks >> (32 - BITS)


@triton.jit
def _highest_with(ranks, amounts, needed, BITS: tl.constexpr):
    """The highest rank such that amounts of it and all above reach ``needed``; 0 where all do not."""
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 2 ** (BITS - 1), tl.uint32)
    for _ in range(BITS):
        trial = found | bit
        found = tl.where(tl.sum(tl.where(ranks >= trial, amounts, 0), 0) >= needed, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def _id_at(ids, among, count, ID_BITS: tl.constexpr):
    """The ``count``-th lowest of the ids."""
    found = tl.full([], 0, tl.int32)
    bit = tl.full([], 2 ** (ID_BITS - 1), tl.int32)
    for _ in range(ID_BITS):
        trial = found | bit
        found = tl.where(tl.sum((among & (ids < trial)).to(tl.int32), 0) < count, trial, found)
        bit = bit >> 1
    return found


@triton.jit(do_not_specialize=["num_rows", "num_parts", "groups_per_part"])
def _tops_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    tops_ptr,  # [R, 8 G] float32, the largest logit of each run
    totals_ptr,  # [R, G] float32, weights beside the group's largest
    stride,
    num_rows,
    num_tokens,
    num_groups,
    num_parts,
    groups_per_part,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // num_parts
    first = tl.program_id(0) % num_parts * groups_per_part
    last = tl.minimum(first + groups_per_part, num_groups)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (word(rows_ptr, _WISHES, row, num_rows) & _CUTS) != 0:
        scale = scale_of(rows_ptr, row, num_rows)
        start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
        ahead = group_logits(start_ptr, num_tokens, first)
        further = group_logits(start_ptr, num_tokens, first + 1)
        for group in range(first, last):
            raw = wanted(ahead, limit, group)
            ahead = further
            if group + 2 < last:
                further = group_logits(start_ptr, num_tokens, group + 2)
            tops = tl.max(tl.reshape(raw, [RUNS_PER_GROUP, _RUN]), 1)
            place = row * num_groups + group
            tl.store(tops_ptr + place * RUNS_PER_GROUP + tl.arange(0, RUNS_PER_GROUP), tops)
            weights = tl.exp2((raw - bounded(tl.max(tops, 0))) * scale)
            tl.store(totals_ptr + place, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["num_rows"])
def _level_kernel(
    rows_ptr,  # [14 R + M] int32
    tops_ptr,  # [R, 8 G] float32
    levels_ptr,  # [R] float32
    counts_ptr,  # [R] int32
    num_rows,
    num_groups,
    RUNS: tl.constexpr,
    GATHERED: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    level = tl.full([], float("-inf"), tl.float32)
    limit = limit_of(rows_ptr, row, num_rows)
    if ((word(rows_ptr, _WISHES, row, num_rows) & _CUTS) != 0) & (limit > GATHERED):
        num_runs = (limit + _RUN - 1) // _RUN
        runs = tl.arange(0, RUNS)
        place = row * num_groups * RUNS_PER_GROUP + runs
        tops = tl.load(tops_ptr + place, mask=runs < num_runs, other=float("-inf"))
        least = (num_runs.to(tl.float32) * _SHARE).to(tl.int32)
        needed = tl.maximum(least, tl.minimum(word(rows_ptr, _TOP_K, row, num_rows), num_runs))
        ranks = _rank(tops, BITS)
        chosen = ranks >= _highest_with(ranks, (runs < num_runs).to(tl.int32), needed, BITS)
        level = tl.min(tl.where(chosen & (runs < num_runs), tops, float("inf")), 0)
    tl.store(levels_ptr + row, level)
    tl.store(counts_ptr + row, 0)


@triton.jit(do_not_specialize=["num_rows", "num_parts", "groups_per_part"])
def _collect_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    levels_ptr,  # [R] float32
    counts_ptr,  # [R] int32
    values_ptr,  # [R, GATHERED] float32
    ids_ptr,  # [R, GATHERED] int32
    stride,
    num_rows,
    num_tokens,
    num_groups,
    num_parts,
    groups_per_part,
    GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // num_parts
    first = tl.program_id(0) % num_parts * groups_per_part
    last = tl.minimum(first + groups_per_part, num_groups)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (word(rows_ptr, _WISHES, row, num_rows) & _CUTS) != 0:
        level = tl.load(levels_ptr + row)
        start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
        ahead = group_logits(start_ptr, num_tokens, first)
        further = group_logits(start_ptr, num_tokens, first + 1)
        for group in range(first, last):
            raw = wanted(ahead, limit, group)
            ahead = further
            if group + 2 < last:
                further = group_logits(start_ptr, num_tokens, group + 2)
            is_chosen = (raw >= level) & (raw > UNWANTED)
            chosen = is_chosen.to(tl.int32)
            count = tl.sum(chosen, 0)
            if count > 0:
                slot = tl.atomic_add(counts_ptr + row, count, sem="relaxed") + tl.cumsum(chosen, 0) - 1
                own = row.to(tl.int64) * GATHERED + slot
                tl.store(values_ptr + own, raw, mask=is_chosen & (slot < GATHERED))
                tl.store(ids_ptr + own, group_ids(group), mask=is_chosen & (slot < GATHERED))


@triton.jit
def _top_p(rows_ptr, row, num_rows):
    """The row's top-p, float64."""
    low = word(rows_ptr, _TOP_P_LOW, row, num_rows).to(tl.uint32, bitcast=True).to(tl.int64)
    high = word(rows_ptr, _TOP_P_HIGH, row, num_rows).to(tl.int64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def _all_mass(tops_ptr, totals_ptr, row, num_groups, scale, largest, GROUPS: tl.constexpr):
    """The mass of all ids, float64 in the measure of ``_WHOLE``."""
    groups = tl.arange(0, GROUPS)
    runs = (row * num_groups + groups[:, None]) * RUNS_PER_GROUP + tl.arange(0, RUNS_PER_GROUP)[None, :]
    tops = tl.max(tl.load(tops_ptr + runs, mask=groups[:, None] < num_groups, other=float("-inf")), 1)
    totals = tl.load(totals_ptr + row * num_groups + groups, mask=groups < num_groups, other=0.0)
    shrinks = tl.exp2((bounded(tops) - bounded(largest)) * scale)
    return tl.sum((totals * shrinks).to(tl.float64), 0) * _WHOLE


@triton.jit(do_not_specialize=["num_rows"])
def _select_kernel(
    rows_ptr,  # [14 R + M] int32
    tops_ptr,  # [R, 8 G] float32
    totals_ptr,  # [R, G] float32
    levels_ptr,  # [R] float32
    counts_ptr,  # [R] int32
    values_ptr,  # [R, GATHERED] float32
    ids_ptr,  # [R, GATHERED] int32
    cuts_ptr,  # [3, R] int32
    num_rows,
    num_groups,
    GROUPS: tl.constexpr,
    GATHERED: tl.constexpr,
    BITS: tl.constexpr,
    ID_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    threshold = tl.full([], float("-inf"), tl.float32)
    last = tl.full([], NOTHING, tl.int32)
    short = tl.full([], 0, tl.int32)
    if (word(rows_ptr, _WISHES, row, num_rows) & _CUTS) != 0:
        scale, level, count = (
            scale_of(rows_ptr, row, num_rows), tl.load(levels_ptr + row), tl.load(counts_ptr + row)
        )  # fmt: skip
        slots = tl.arange(0, GATHERED)
        raw = tl.load(values_ptr + row.to(tl.int64) * GATHERED + slots, mask=slots < count, other=float("-inf"))
        ids = tl.load(ids_ptr + row.to(tl.int64) * GATHERED + slots, mask=slots < count, other=NOTHING)
        largest = tl.max(raw, 0)
        weights = tl.exp2((raw - bounded(largest)) * scale)
        masses = (weights * _WHOLE).to(tl.int64)
        ranks = _rank(raw, BITS)

        min_p = word(rows_ptr, _MIN_P, row, num_rows).to(tl.float32, bitcast=True)
        stays = (slots < count) & (weights >= min_p)
        # Whether nothing that was not gathered stays.
        is_whole = (level <= UNWANTED) | (tl.exp2((bounded(level) - bounded(largest)) * scale) < min_p)

        top_k = word(rows_ptr, _TOP_K, row, num_rows)
        if (top_k > 0) & (tl.sum(stays.to(tl.int32), 0) >= top_k):
            stays = stays & (ranks >= _highest_with(ranks, stays.to(tl.int32), top_k, BITS))
            is_whole = is_whole | (top_k > 0)

        top_p = _top_p(rows_ptr, row, num_rows)
        if (top_p < 1.0) & (is_whole | ((min_p == 0.0) & (top_k == 0))):
            kept = tl.where(stays, masses, 0)
            gathered = tl.sum(kept, 0)
            mass = gathered.to(tl.float64)
            if is_whole == 0:
                mass = _all_mass(tops_ptr, totals_ptr, row, num_groups, scale, largest, GROUPS)
            needed = (mass * top_p).to(tl.int64)
            needed = needed + (needed.to(tl.float64) < mass * top_p).to(tl.int64)
            if gathered >= needed:
                rank = _highest_with(ranks, kept, needed, BITS)
                equals = stays & (ranks == rank)
                each = tl.maximum(tl.max(tl.where(equals, masses, 0), 0), 1)
                above = tl.sum(tl.where(ranks > rank, kept, 0), 0)
                num_wanted = (needed - above + each - 1) // each
                if num_wanted < tl.sum(equals.to(tl.int64), 0):
                    last = _id_at(ids, equals, num_wanted.to(tl.int32), ID_BITS)
                stays = stays & (ranks >= rank)
                is_whole = is_whole | (top_p < 1.0)
        threshold = tl.min(tl.where(stays, raw, float("inf")), 0)
        short = ((is_whole == 0) | (count > GATHERED)).to(tl.int32)
    tl.store(cuts_ptr + LEAST * num_rows + row, threshold.to(tl.int32, bitcast=True))
    tl.store(cuts_ptr + LAST * num_rows + row, last)
    tl.store(cuts_ptr + SHORT * num_rows + row, short)
