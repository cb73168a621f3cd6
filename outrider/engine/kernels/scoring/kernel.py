# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""The scoring kernels: partial results by groups of neighbouring ids, and the answers of rows that nothing cuts.

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
    RUNS_PER_GROUP,
    bits_of,
    bounded,
    group_logits,
    group_marks,
    group_runs,
    limit_of,
    lowest_at,
    noise,
    noise_bound,
    outside_only,
    row_start,
    run_ids,
    scale_of,
    support_ids,
    support_start,
    support_stop,
    wanted,
    word,
)
from outrider.engine.kernels.scoring.drawing import (
    drawn,
    group_lots,
    store_probs,
    support_logits,
)
from outrider.engine.kernels.scoring.rows import Column, Found, Wish
from outrider.randomness.streams import Stream

_WISHES = tl.constexpr(int(Column.WISHES))
_COUPLED = tl.constexpr(int(Wish.COUPLED))
_DRAWS = tl.constexpr(int(Wish.DRAWS))
_EXCLUDES = tl.constexpr(int(Wish.EXCLUDES))
_ENTROPY = tl.constexpr(int(Wish.ENTROPY))
_CUTS = tl.constexpr(int(Wish.CUTS))
_FOUND_UNFIT = tl.constexpr(int(Found.UNFIT))
_FOUND_LARGEST = tl.constexpr(int(Found.LARGEST))
_FOUND_ARGMAX = tl.constexpr(int(Found.ARGMAX))
_FOUND_RACED = tl.constexpr(int(Found.RACED))
_FOUND_MASS = tl.constexpr(int(Found.MASS))
_FOUND_OUTSIDE = tl.constexpr(int(Found.OUTSIDE))
_FOUND_ENTROPY = tl.constexpr(int(Found.ENTROPY))
_STREAM_COUPLED = tl.constexpr(int(Stream.COUPLED))
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


@triton.jit
def _mass_outside(weights, total, rows_ptr, row, num_rows, first_ids, group, IDS: tl.constexpr):
    """The sum of a group's weights without those of the support; ``first_ids`` [IDS] are its first."""
    mass = total
    marks = group_marks(rows_ptr, row, num_rows, first_ids, group, IDS)
    if tl.max(marks, 0) != 0:
        mass = tl.sum(outside_only(weights, marks, 0.0))
    return mass


@triton.jit(do_not_specialize=["num_rows", "num_parts", "groups_per_part"])
def _group_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    groups_ptr,  # [5, R, G] float32
    unfit_ptr,  # [R, G] float32, not finite where a logit is not
    tops_ptr,  # [R, 128 G], the largest logit of each run
    stride,
    num_rows,
    num_tokens,
    num_groups,
    num_parts,
    groups_per_part,
    HAS_COUPLED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    IDS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // num_parts
    first = tl.program_id(0) % num_parts * groups_per_part
    last = tl.minimum(first + groups_per_part, num_groups)
    size = num_rows * num_groups
    if PDL:
        gdc_wait()  # first: the kernels that follow rely on it that the logits are there when they begin
        gdc_launch_dependents()
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
    # The next group is on its way while one is looked at.
    ahead = group_logits(start_ptr, num_tokens, first)
    wishes = word(rows_ptr, _WISHES, row, num_rows)
    scale = scale_of(rows_ptr, row, num_rows)
    bits_base = wishes * 0
    excludes = (wishes & (_EXCLUDES | _CUTS)) == _EXCLUDES
    is_cut = (wishes & _CUTS) != 0
    own_tops_ptr = tops_ptr + row.to(tl.int64) * num_groups * RUNS_PER_GROUP
    if HAS_MARKS:
        first_ids = support_ids(rows_ptr, row, num_rows, support_start(rows_ptr, row, num_rows), IDS)
    for group in range(first, last):
        raw = wanted(ahead, limit, group)
        if group + 1 < last:
            ahead = group_logits(start_ptr, num_tokens, group + 1)
        place = row * num_groups + group
        tl.store(unfit_ptr + place, tl.sum(raw))
        tops = tl.max(raw, 1)
        largest = tl.max(tops, 0)
        tl.store(groups_ptr + _LARGEST * size + place, largest)
        if HAS_CUTS:
            tl.store(own_tops_ptr + group_runs(group), tops.to(tops_ptr.dtype.element_ty), mask=is_cut)
        if (wishes & (_DRAWS | _ENTROPY | _CUTS)) != 0:
            weights = tl.exp2(raw * scale - bounded(largest) * scale)
            total = tl.sum(weights)
            tl.store(groups_ptr + _TOTAL * size + place, total)
            mass = total
            if HAS_MARKS:
                if excludes:
                    mass = _mass_outside(weights, total, rows_ptr, row, num_rows, first_ids, group, IDS)
            tl.store(groups_ptr + _MASS * size + place, mass)
        if HAS_COUPLED:
            if (wishes & (_COUPLED | _CUTS)) == _COUPLED:
                bits = bits_of(rows_ptr, row, num_rows, group_runs(group), bits_base, bits_base + _STREAM_COUPLED)
                bound = tl.max(raw * scale + noise_bound(bits, FAST)) + 32.0
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
    groups_ptr,  # [5, R, G] float32
    stride,
    num_rows,
    num_tokens,
    num_groups,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // num_groups
    group = tl.program_id(0) % num_groups
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (word(rows_ptr, _WISHES, row, num_rows) & (_ENTROPY | _CUTS)) == _ENTROPY:
        scale = scale_of(rows_ptr, row, num_rows)
        _, largest, _, total = _row_law(groups_ptr, row, num_rows, num_groups, tl.arange(0, GROUPS), scale)
        start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        probs = tl.exp2(raw * scale - bounded(largest) * scale) / total
        part = -tl.sum(probs * tl.log(probs + _ENTROPY_OFFSET))
        tl.store(groups_ptr + _PART_ENTROPY * num_rows * num_groups + row * num_groups + group, part)


@triton.jit
def _coupled_winner(start_ptr, num_tokens, limit, rows_ptr, bounds, groups, row, num_rows,
                    FAST: tl.constexpr):  # fmt: skip
    """The winner of all groups: they are raced in the order of their bounds until none can still hold it."""
    scale = scale_of(rows_ptr, row, num_rows)
    winner = row * 0 + NOTHING
    best = scale * 0.0 + float("-inf")
    bound = tl.max(bounds, 0)
    while (bound > float("-inf")) & (bound + _SLACK >= best):
        group = lowest_at(bounds, bound, groups)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        bits = bits_of(rows_ptr, row, num_rows, group_runs(group), row * 0, row * 0 + _STREAM_COUPLED)
        scores = raw * scale + noise(bits, FAST)
        score = tl.max(scores)
        token = lowest_at(scores, score, run_ids(group_runs(group)))
        wins = (score > best) | ((score == best) & (token < winner))
        winner = tl.where(wins, token, winner)
        best = tl.where(wins, score, best)
        bounds = tl.where(groups == group, float("-inf"), bounds)
        bound = tl.max(bounds, 0)
    return winner


@triton.jit
def _answer_support(logits_ptr, stride, rows_ptr, groups_ptr, found_ptr, row, num_rows, num_groups,
                    GROUPS: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Probabilities of the row's support."""
    start = support_start(rows_ptr, row, num_rows)
    ids, raw = support_logits(logits_ptr, stride, rows_ptr, row, num_rows, start, IDS)
    if PDL:
        gdc_wait()
    scale = scale_of(rows_ptr, row, num_rows)
    _, largest, _, total = _row_law(groups_ptr, row, num_rows, num_groups, tl.arange(0, GROUPS), scale)
    store_probs(found_ptr, rows_ptr, row, num_rows, start, ids, raw, largest, total, IDS)
    for further in range(start + IDS, support_stop(rows_ptr, row, num_rows), IDS):
        ids, raw = support_logits(logits_ptr, stride, rows_ptr, row, num_rows, further, IDS)
        store_probs(found_ptr, rows_ptr, row, num_rows, further, ids, raw, largest, total, IDS)


@triton.jit
def _answer_row(logits_ptr, stride, num_tokens, rows_ptr, groups_ptr, unfit_ptr, found_ptr, row, num_rows, num_groups,
                GROUPS: tl.constexpr, IDS: tl.constexpr, HAS_COUPLED: tl.constexpr, HAS_MARKS: tl.constexpr,
                FAST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """All else that is found of a row."""
    groups = tl.arange(0, GROUPS)
    shares = groups < num_groups
    size = num_rows * num_groups
    place = row * num_groups + groups
    own = found_ptr + row
    wishes = word(rows_ptr, _WISHES, row, num_rows)
    scale = scale_of(rows_ptr, row, num_rows)
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
    lots = tl.zeros([GROUPS], tl.float32)
    if (wishes & _DRAWS) != 0:
        lots = group_lots(rows_ptr, row, num_rows, GROUPS, FAST)
    if PDL:
        gdc_wait()
    tops, largest, shrinks, total = _row_law(groups_ptr, row, num_rows, num_groups, groups, scale)
    unfit = tl.load(unfit_ptr + place, mask=shares, other=0.0)
    is_unfit = tl.max(tl.where(tl.abs(unfit) < float("inf"), 0, 1), 0)
    tl.store(own + _FOUND_UNFIT * num_rows, is_unfit)
    tl.store(own + _FOUND_LARGEST * num_rows, largest.to(tl.int32, bitcast=True))
    if (wishes & (_COUPLED | _DRAWS)) == 0:
        group = tl.minimum(lowest_at(tops, largest, groups), num_groups - 1)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        tl.store(own + _FOUND_ARGMAX * num_rows, lowest_at(raw, largest, run_ids(group_runs(group))))
    if HAS_COUPLED:
        if (wishes & _COUPLED) != 0:
            bounds = tl.load(groups_ptr + _BOUND * size + place, mask=shares, other=float("-inf"))
            raced = _coupled_winner(start_ptr, num_tokens, limit, rows_ptr, bounds, groups, row, num_rows, FAST)
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
            token = drawn(logits_ptr, stride, num_tokens, rows_ptr, masses, lots, 0.0, 0, row, num_rows,
                          (wishes & _EXCLUDES) != 0, HAS_MARKS, False, GROUPS, IDS, FAST)  # fmt: skip
        tl.store(own + _FOUND_OUTSIDE * num_rows, token)


@triton.jit(do_not_specialize=["num_rows"])
def _answer_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    groups_ptr,  # [5, R, G] float32
    unfit_ptr,  # [R, G] float32
    found_ptr,  # [7 R + M] int32
    stride,
    num_rows,
    num_tokens,
    num_groups,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    HAS_COUPLED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    # All but the groups is there already: what needs no group is done while they are made.
    if PDL:
        gdc_launch_dependents()
    if (word(rows_ptr, _WISHES, row, num_rows) & _CUTS) != 0:
        if PDL:
            gdc_wait()
    elif tl.program_id(1) != 0:
        _answer_support(logits_ptr, stride, rows_ptr, groups_ptr, found_ptr, row, num_rows, num_groups, GROUPS, IDS,
                        PDL)  # fmt: skip
    else:
        _answer_row(logits_ptr, stride, num_tokens, rows_ptr, groups_ptr, unfit_ptr, found_ptr, row, num_rows,
                    num_groups, GROUPS, IDS, HAS_COUPLED, HAS_MARKS, FAST, PDL)  # fmt: skip
