# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""The scoring kernels: marks of supports, partial results by groups of neighbouring ids, and each row's answer.

A group is what the two-stage draw of ``randomness/streams.py`` calls one, so that its partial mass serves both. One
warp has a group: its reductions need no barrier. Only the group kernel reads the logits, once; the answer reads one
group of each row that draws, and the support.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.kernels.scoring.device_functions import (
    NOTHING,
    NUM_COLUMNS,
    SHORT,
    base_of,
    bits_of,
    bounded,
    group_blocks,
    group_ids,
    group_logits,
    group_marks,
    is_marked,
    limit_of,
    log2_of,
    lowest_at,
    noise,
    noise_bound,
    outside_only,
    row_start,
    scale_of,
    uncut,
    wanted,
    word,
)
from outrider.engine.kernels.scoring.rows import Column, Found, Wish
from outrider.randomness.streams import Stream

_WISHES = tl.constexpr(int(Column.WISHES))
_START = tl.constexpr(int(Column.SUPPORT_START))
_STOP = tl.constexpr(int(Column.SUPPORT_STOP))
_COUPLED = tl.constexpr(int(Wish.COUPLED))
_DRAWS = tl.constexpr(int(Wish.DRAWS))
_EXCLUDES = tl.constexpr(int(Wish.EXCLUDES))
_ENTROPY = tl.constexpr(int(Wish.ENTROPY))
_FOUND_UNFIT = tl.constexpr(int(Found.UNFIT))
_FOUND_LARGEST = tl.constexpr(int(Found.LARGEST))
_FOUND_ARGMAX = tl.constexpr(int(Found.ARGMAX))
_FOUND_RACED = tl.constexpr(int(Found.RACED))
_FOUND_MASS = tl.constexpr(int(Found.MASS))
_FOUND_OUTSIDE = tl.constexpr(int(Found.OUTSIDE))
_FOUND_ENTROPY = tl.constexpr(int(Found.ENTROPY))
_FOUND_ALL = tl.constexpr(len(Found))
_STREAM_COUPLED = tl.constexpr(int(Stream.COUPLED))
_STREAM_OUTSIDE = tl.constexpr(int(Stream.OUTSIDE))
_STREAM_GROUP = tl.constexpr(int(Stream.OUTSIDE_GROUP))
_ENTROPY_OFFSET = tl.constexpr(1e-5)
_SLACK = tl.constexpr(1e-4)
"""Bits; many times what rounding can take from a bound."""

# What is kept of each group: [5, R, G] float32
_LARGEST = tl.constexpr(0)
_TOTAL = tl.constexpr(1)
_MASS = tl.constexpr(2)
_BOUND = tl.constexpr(3)
_PART_ENTROPY = tl.constexpr(4)
NUM_REALS = 5


@triton.jit(do_not_specialize=["num_rows"])
def _mark_kernel(
    rows_ptr,  # [14 R + M] int32
    marks_ptr,  # [R, W] int32, a bit for each id
    num_rows,
    num_marks,
    CLEARED: tl.constexpr,
    IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = marks_ptr + row.to(tl.int64) * num_marks
    for start in range(0, num_marks, CLEARED):
        place = start + tl.arange(0, CLEARED)
        tl.store(own + place, tl.zeros([CLEARED], tl.int32), mask=place < num_marks)
    tl.debug_barrier()
    stop = word(rows_ptr, _STOP, row, num_rows)
    if (word(rows_ptr, _WISHES, row, num_rows) & _EXCLUDES) != 0:
        for start in range(word(rows_ptr, _START, row, num_rows), stop, IDS):
            place = start + tl.arange(0, IDS)
            ids = tl.load(rows_ptr + NUM_COLUMNS * num_rows + place, mask=place < stop, other=0)
            bits = (tl.full([IDS], 1, tl.int32) << (ids & 31)).to(tl.int32)
            tl.atomic_or(own + (ids >> 5), bits, mask=place < stop, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows", "num_parts", "groups_per_part"])
def _group_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    marks_ptr,  # [R, 4 W] int8
    cuts_ptr,  # [3, R] int32
    groups_ptr,  # [5, R, G] float32
    unfit_ptr,  # [R, G] float32, not finite where a logit is not
    stride,
    num_rows,
    num_tokens,
    num_groups,
    num_marks,
    num_parts,
    groups_per_part,
    HAS_COUPLED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // num_parts
    first = tl.program_id(0) % num_parts * groups_per_part
    last = tl.minimum(first + groups_per_part, num_groups)
    size = num_rows * num_groups
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wishes = word(rows_ptr, _WISHES, row, num_rows)
    scale = scale_of(rows_ptr, row, num_rows)
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
    bits_base = wishes * 0
    own_marks_ptr = marks_ptr + row.to(tl.int64) * num_marks * 4
    # The next groups are on their way while one is looked at.
    if HAS_MARKS:
        marks_ahead = group_marks(own_marks_ptr, first)
    ahead = group_logits(start_ptr, num_tokens, first)
    further = group_logits(start_ptr, num_tokens, first + 1)
    for group in range(first, last):
        raw = wanted(ahead, limit, group)
        ahead = further
        if group + 2 < last:
            further = group_logits(start_ptr, num_tokens, group + 2)
        if HAS_MARKS:
            marks = marks_ahead
            if group + 1 < last:
                marks_ahead = group_marks(own_marks_ptr, group + 1)
        place = row * num_groups + group
        tl.store(unfit_ptr + place, tl.sum(raw, 0))
        raw = uncut(raw, cuts_ptr, row, num_rows, group_ids(group), HAS_CUTS)
        largest = tl.max(raw, 0)
        tl.store(groups_ptr + _LARGEST * size + place, largest)
        if (wishes & (_DRAWS | _ENTROPY)) != 0:
            weights = tl.exp2(raw * scale - bounded(largest) * scale)
            total = tl.sum(weights, 0)
            mass = total
            if HAS_MARKS:
                mass = tl.sum(outside_only(weights, marks), 0)
            tl.store(groups_ptr + _TOTAL * size + place, total)
            tl.store(groups_ptr + _MASS * size + place, mass)
        if HAS_COUPLED:
            if (wishes & _COUPLED) != 0:
                bits = bits_of(rows_ptr, row, num_rows, group_blocks(group), bits_base, bits_base + _STREAM_COUPLED)
                bound = tl.max(raw * scale + noise_bound(bits, FAST), 0) + 32.0
                tl.store(groups_ptr + _BOUND * size + place, bound)


@triton.jit
def _row_law(groups_ptr, row, num_rows, num_groups, groups, scale):
    """Each group's largest logit, the row's, each group's weight beside it, and the sum of all weights."""
    size = num_rows * num_groups
    place = row * num_groups + groups
    shares = groups < num_groups
    tops = tl.load(groups_ptr + _LARGEST * size + place, mask=shares, other=float("-inf"))
    largest = tl.max(tops, 0)
    # Products as in the group kernel: their rounding is then no difference between groups.
    shrinks = tl.exp2(bounded(tops) * scale - bounded(largest) * scale)
    totals = tl.load(groups_ptr + _TOTAL * size + place, mask=shares, other=0.0)
    return tops, largest, shrinks, tl.sum(totals * shrinks, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _entropy_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    cuts_ptr,  # [3, R] int32
    groups_ptr,  # [5, R, G] float32
    stride,
    num_rows,
    num_tokens,
    num_groups,
    GROUPS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // num_groups
    group = tl.program_id(0) % num_groups
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (word(rows_ptr, _WISHES, row, num_rows) & _ENTROPY) != 0:
        scale = scale_of(rows_ptr, row, num_rows)
        _, largest, _, total = _row_law(groups_ptr, row, num_rows, num_groups, tl.arange(0, GROUPS), scale)
        start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        raw = uncut(raw, cuts_ptr, row, num_rows, group_ids(group), HAS_CUTS)
        probs = tl.exp2(raw * scale - bounded(largest) * scale) / total
        part = -tl.sum(probs * tl.log(probs + _ENTROPY_OFFSET), 0)
        tl.store(groups_ptr + _PART_ENTROPY * num_rows * num_groups + row * num_groups + group, part)


@triton.jit
def _coupled_winner(start_ptr, num_tokens, limit, rows_ptr, cuts_ptr, bounds, groups, row, num_rows,
                    HAS_CUTS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """The winner of all groups: they are raced in the order of their bounds until none can still hold it."""
    scale = scale_of(rows_ptr, row, num_rows)
    winner = row * 0 + NOTHING
    best = scale * 0.0 + float("-inf")
    bound = tl.max(bounds, 0)
    while (bound > float("-inf")) & (bound + _SLACK >= best):
        group = lowest_at(bounds, bound, groups)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        raw = uncut(raw, cuts_ptr, row, num_rows, group_ids(group), HAS_CUTS)
        bits = bits_of(rows_ptr, row, num_rows, group_blocks(group), row * 0, row * 0 + _STREAM_COUPLED)
        scores = raw * scale + noise(bits, FAST)
        score = tl.max(scores, 0)
        token = lowest_at(scores, score, group_ids(group))
        wins = (score > best) | ((score == best) & (token < winner))
        winner = tl.where(wins, token, winner)
        best = tl.where(wins, score, best)
        bounds = tl.where(groups == group, float("-inf"), bounds)
        bound = tl.max(bounds, 0)
    return winner


@triton.jit
def _drawn(start_ptr, num_tokens, limit, rows_ptr, marks_ptr, cuts_ptr, masses, groups, row, num_rows, num_marks,
           excludes, HAS_MARKS: tl.constexpr, HAS_CUTS: tl.constexpr, GROUPS: tl.constexpr,
           FAST: tl.constexpr):  # fmt: skip
    """A token by the masses: first the group, then the token in it."""
    base = base_of(rows_ptr, row, num_rows)
    lots = bits_of(rows_ptr, row, num_rows, tl.arange(0, GROUPS // 4), base, row * 0 + _STREAM_GROUP)
    times = log2_of(tl.where(masses > 0.0, masses, 1.0), FAST) + noise(lots, FAST)
    times = tl.where(masses > 0.0, times, float("-inf"))
    group = lowest_at(times, tl.max(times, 0), groups)
    ids = group_ids(group)
    raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
    raw = uncut(raw, cuts_ptr, row, num_rows, ids, HAS_CUTS)
    bits = bits_of(rows_ptr, row, num_rows, group_blocks(group), base, row * 0 + _STREAM_OUTSIDE)
    scores = raw * scale_of(rows_ptr, row, num_rows) + noise(bits, FAST)
    if HAS_MARKS:
        if excludes:
            scores = tl.where(is_marked(marks_ptr, row, num_marks, ids), float("-inf"), scores)
    return lowest_at(scores, tl.max(scores, 0), ids)


@triton.jit(do_not_specialize=["num_rows"])
def _answer_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    marks_ptr,  # [R, W] int32
    cuts_ptr,  # [3, R] int32
    groups_ptr,  # [5, R, G] float32
    unfit_ptr,  # [R, G] float32
    found_ptr,  # [7 R + M] int32
    stride,
    num_rows,
    num_tokens,
    num_groups,
    num_marks,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    HAS_COUPLED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    shares = groups < num_groups
    size = num_rows * num_groups
    place = row * num_groups + groups
    own = found_ptr + row
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wishes = word(rows_ptr, _WISHES, row, num_rows)
    scale = scale_of(rows_ptr, row, num_rows)
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
    tops, largest, shrinks, total = _row_law(groups_ptr, row, num_rows, num_groups, groups, scale)
    unfit = tl.load(unfit_ptr + place, mask=shares, other=0.0)
    is_unfit = tl.max(tl.where(tl.abs(unfit) < float("inf"), 0, 1), 0)
    if HAS_CUTS:
        is_unfit += 2 * tl.load(cuts_ptr + SHORT * num_rows + row)
    tl.store(own + _FOUND_UNFIT * num_rows, is_unfit)
    tl.store(own + _FOUND_LARGEST * num_rows, largest.to(tl.int32, bitcast=True))
    if (wishes & _COUPLED) == 0:
        group = tl.minimum(lowest_at(tops, largest, groups), num_groups - 1)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        tl.store(own + _FOUND_ARGMAX * num_rows, lowest_at(raw, largest, group_ids(group)))
    if HAS_COUPLED:
        if (wishes & _COUPLED) != 0:
            bounds = tl.load(groups_ptr + _BOUND * size + place, mask=shares, other=float("-inf"))
            raced = _coupled_winner(start_ptr, num_tokens, limit, rows_ptr, cuts_ptr, bounds, groups, row, num_rows,
                                    HAS_CUTS, FAST)  # fmt: skip
            tl.store(own + _FOUND_RACED * num_rows, raced)
    if (wishes & _ENTROPY) != 0:
        parts = tl.load(groups_ptr + _PART_ENTROPY * size + place, mask=shares, other=0.0)
        tl.store(own + _FOUND_ENTROPY * num_rows, tl.sum(parts, 0).to(tl.int32, bitcast=True))
    if (wishes & _DRAWS) != 0:
        masses = tl.load(groups_ptr + _MASS * size + place, mask=shares, other=0.0) * shrinks
        mass = tl.sum(masses, 0)
        tl.store(own + _FOUND_MASS * num_rows, (mass / total).to(tl.int32, bitcast=True))
        token = row * 0 - 1
        if mass > 0.0:
            token = _drawn(start_ptr, num_tokens, limit, rows_ptr, marks_ptr, cuts_ptr, masses, groups, row, num_rows,
                           num_marks, (wishes & _EXCLUDES) != 0, HAS_MARKS, HAS_CUTS, GROUPS, FAST)  # fmt: skip
        tl.store(own + _FOUND_OUTSIDE * num_rows, token)
    stop = word(rows_ptr, _STOP, row, num_rows)
    for start in range(word(rows_ptr, _START, row, num_rows), stop, IDS):
        entry = start + tl.arange(0, IDS)
        ids = tl.load(rows_ptr + NUM_COLUMNS * num_rows + entry, mask=entry < stop, other=0)
        raw = tl.load(start_ptr + ids, mask=entry < stop, other=0.0).to(tl.float32)
        raw = uncut(raw, cuts_ptr, row, num_rows, ids, HAS_CUTS)
        probs = tl.exp2(raw * scale - bounded(largest) * scale) / total
        tl.store(found_ptr + _FOUND_ALL * num_rows + entry, probs.to(tl.int32, bitcast=True), mask=entry < stop)
