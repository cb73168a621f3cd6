# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""The answers of rows that nothing cuts, from the partial results of their groups: of the logits these kernels read
one group of each row that draws, and the support. The entropy, which few want, reads all once more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.scoring.device_functions import (
    NOTHING,
    base_of,
    bits_of,
    bounded,
    group_logits,
    group_marks,
    group_runs,
    keys_of,
    limit_of,
    lowest_at,
    noise,
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
from outrider.kernels.scoring.drawing import (
    drawn_group,
    drawn_token,
    group_gumbel,
    store_probs,
    support_logits,
    token_gumbel,
)
from outrider.kernels.scoring.partials import FIELDS, load_partials, shrinks
from outrider.kernels.scoring.rows import Found, RowFlags, ScoringColumn
from outrider.randomness.streams import Stream

_FLAGS = tl.constexpr(int(ScoringColumn.FLAGS))
_COUPLED = tl.constexpr(int(RowFlags.COUPLED))
_DRAWS = tl.constexpr(int(RowFlags.DRAWS))
_EXCLUDES = tl.constexpr(int(RowFlags.EXCLUDES))
_ENTROPY = tl.constexpr(int(RowFlags.ENTROPY))
_CUTS = tl.constexpr(int(RowFlags.CUTS))
_FOUND_STATUS = tl.constexpr(int(Found.STATUS))
_FOUND_LARGEST = tl.constexpr(int(Found.LARGEST))
_FOUND_ARGMAX = tl.constexpr(int(Found.ARGMAX))
_FOUND_GUMBEL_ARGMAX = tl.constexpr(int(Found.GUMBEL_ARGMAX))
_FOUND_MASS = tl.constexpr(int(Found.MASS))
_FOUND_OUTSIDE = tl.constexpr(int(Found.OUTSIDE))
_FOUND_ENTROPY = tl.constexpr(int(Found.ENTROPY))
_STREAM_COUPLED = tl.constexpr(int(Stream.COUPLED))
_ENTROPY_OFFSET = tl.constexpr(1e-5)
_SLACK = tl.constexpr(1e-4)
"""Bits; many times what rounding can take from a bound."""


@triton.jit
def _add(left_total, left_mass, right_total, right_mass):
    return left_total + right_total, left_mass + right_mass


@triton.jit
def _entropy_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    groups_ptr,  # [R, G, 4] float32
    parts_ptr,  # [R, G] float32
    stride,
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
    if (word(rows_ptr, _FLAGS, row) & (_ENTROPY | _CUTS)) == _ENTROPY:
        scale = scale_of(rows_ptr, row)
        tops, totals, _, _, _ = load_partials(groups_ptr + row * num_groups * FIELDS, num_groups, GROUPS)
        largest = tl.max(tops, 0)
        total = tl.sum(totals * shrinks(tops, largest, scale), 0)
        start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row), limit_of(rows_ptr, row)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        probs = tl.exp2(raw * scale - bounded(largest) * scale) / total
        part = -tl.sum(probs * tl.log(probs + _ENTROPY_OFFSET))
        tl.store(parts_ptr + row * num_groups + group, part)


@triton.jit
def _coupled_winner(start_ptr, num_tokens, limit, scale, keys, bounds, groups, FAST: tl.constexpr):
    """The winner of all groups: they are compared in the order of their bounds until none can still hold it."""
    winner = limit * 0 + NOTHING
    best = scale * 0.0 + float("-inf")
    bound = tl.max(bounds, 0)
    while (bound > float("-inf")) & (bound + _SLACK >= best):
        group = lowest_at(bounds, bound, groups)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        bits = bits_of(keys, group_runs(group), 0, _STREAM_COUPLED)
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
    start, stop = support_start(rows_ptr, row), support_stop(rows_ptr, row)
    start_ptr = row_start(logits_ptr, stride, rows_ptr, row)
    ids, raw = support_logits(start_ptr, rows_ptr, num_rows, start, stop, IDS)
    scale = scale_of(rows_ptr, row)
    if PDL:
        gdc_wait()
    tops, totals, _, _, _ = load_partials(groups_ptr + row * num_groups * FIELDS, num_groups, GROUPS)
    largest = tl.max(tops, 0)
    total = tl.sum(totals * shrinks(tops, largest, scale), 0)
    store_probs(found_ptr, scale, num_rows, start, ids, raw, largest, total, IDS)
    for further in range(start + IDS, stop, IDS):
        ids, raw = support_logits(start_ptr, rows_ptr, num_rows, further, stop, IDS)
        store_probs(found_ptr, scale, num_rows, further, ids, raw, largest, total, IDS)


@triton.jit
def _answer_row(logits_ptr, stride, num_tokens, rows_ptr, groups_ptr, parts_ptr, found_ptr, row, num_rows, num_groups,
                GROUPS: tl.constexpr, IDS: tl.constexpr, HAS_COUPLED: tl.constexpr, HAS_MARKS: tl.constexpr,
                FAST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """All else that is found of a row."""
    groups = tl.arange(0, GROUPS)
    own = found_ptr + row
    flags = word(rows_ptr, _FLAGS, row)
    scale, base, keys = scale_of(rows_ptr, row), base_of(rows_ptr, row), keys_of(rows_ptr, row)
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row), limit_of(rows_ptr, row)
    draws = (flags & _DRAWS) != 0
    if HAS_MARKS:
        start, stop = support_start(rows_ptr, row), support_stop(rows_ptr, row)
        first_ids = support_ids(rows_ptr, num_rows, start, stop, IDS)
    gumbel = tl.zeros([GROUPS], tl.float32)
    if draws:
        gumbel = group_gumbel(keys, base, GROUPS, FAST)
    if PDL:
        gdc_wait()
    tops, totals, masses, bounds, not_finite = load_partials(groups_ptr + row * num_groups * FIELDS, num_groups, GROUPS)
    largest = tl.max(tops, 0)
    # All that must be waited for is asked for before anything is stored.
    if draws:
        shares = shrinks(tops, largest, scale)
        masses *= shares
        total, mass = tl.reduce((totals * shares, masses), 0, _add)
        group = drawn_group(masses, gumbel, FAST)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        scores = token_gumbel(keys, base, group, FAST)
        if HAS_MARKS:
            if (flags & _EXCLUDES) != 0:
                marks = group_marks(rows_ptr, num_rows, start, stop, first_ids, group, IDS)
                scores = outside_only(scores, marks, float("-inf"))
        token = tl.where(mass > 0.0, drawn_token(raw * scale + scores, group), -1)
        tl.store(own + _FOUND_MASS * num_rows, (mass / total).to(tl.int32, bitcast=True))
        tl.store(own + _FOUND_OUTSIDE * num_rows, token)
    if HAS_COUPLED:
        if (flags & _COUPLED) != 0:
            winner = _coupled_winner(start_ptr, num_tokens, limit, scale, keys, bounds, groups, FAST)
            tl.store(own + _FOUND_GUMBEL_ARGMAX * num_rows, winner)
    if (flags & (_COUPLED | _DRAWS)) == 0:
        group = tl.minimum(lowest_at(tops, largest, groups), num_groups - 1)
        raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
        tl.store(own + _FOUND_ARGMAX * num_rows, lowest_at(raw, largest, run_ids(group_runs(group))))
    if (flags & _ENTROPY) != 0:
        parts = tl.load(parts_ptr + row * num_groups + groups, mask=groups < num_groups, other=0.0)
        tl.store(own + _FOUND_ENTROPY * num_rows, tl.sum(parts, 0).to(tl.int32, bitcast=True))
    tl.store(own + _FOUND_STATUS * num_rows, tl.max(not_finite, 0))
    tl.store(own + _FOUND_LARGEST * num_rows, largest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows"])
def _answer_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    groups_ptr,  # [R, G, 4] float32
    parts_ptr,  # [R, G] float32
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
    if (word(rows_ptr, _FLAGS, row) & _CUTS) != 0:
        if PDL:
            gdc_wait()
    elif tl.program_id(1) != 0:
        _answer_support(logits_ptr, stride, rows_ptr, groups_ptr, found_ptr, row, num_rows, num_groups, GROUPS, IDS,
                        PDL)  # fmt: skip
    else:
        _answer_row(logits_ptr, stride, num_tokens, rows_ptr, groups_ptr, parts_ptr, found_ptr, row, num_rows,
                    num_groups, GROUPS, IDS, HAS_COUPLED, HAS_MARKS, FAST, PDL)  # fmt: skip
