# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""The one kernel that reads the logits, once: partial results by groups of neighbouring ids.

A group is what the two-stage draw of ``randomness/streams.py`` calls one, so that its partial mass serves both. One
warp has a group: its reductions need no barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.scoring.device_functions import (
    GROUP_BITS,
    RUNS_PER_GROUP,
    bits_of,
    bounded,
    group_logits,
    group_marks,
    group_runs,
    keys_of,
    limit_of,
    noise_bound,
    outside_only,
    row_start,
    scale_of,
    support_ids,
    support_start,
    support_stop,
    wanted,
    word,
)
from outrider.kernels.scoring.pairs import (
    extremes,
    group_pairs,
    numbers,
    upper_halves,
    wanted_pairs,
)
from outrider.kernels.scoring.partials import FIELDS, store_partials
from outrider.kernels.scoring.rows import RowFlags, ScoringColumn
from outrider.randomness.streams import Stream

_FLAGS = tl.constexpr(int(ScoringColumn.FLAGS))
_COUPLED = tl.constexpr(int(RowFlags.COUPLED))
_DRAWS = tl.constexpr(int(RowFlags.DRAWS))
_EXCLUDES = tl.constexpr(int(RowFlags.EXCLUDES))
_ENTROPY = tl.constexpr(int(RowFlags.ENTROPY))
_CUTS = tl.constexpr(int(RowFlags.CUTS))
_STREAM_COUPLED = tl.constexpr(int(Stream.COUPLED))


@triton.jit
def _present(rows_ptr, num_rows, start, stop, first_ids, first, last, IDS: tl.constexpr):
    """A bit for each group from ``first`` to ``last`` in which the support has ids."""
    bits = _bits_of_groups(first_ids, first, last)
    for further in range(start + IDS, stop, IDS):
        bits |= _bits_of_groups(support_ids(rows_ptr, num_rows, further, stop, IDS), first, last)
    return tl.reduce(bits, 0, _either)


@triton.jit
def _bits_of_groups(ids, first, last):
    groups = ids >> GROUP_BITS
    bits = tl.full(ids.shape, 1, tl.int32) << ((groups - first) & 31)
    return tl.where((groups >= first) & (groups < last), bits, 0)


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _load(start_ptr, num_tokens, group, PACKED: tl.constexpr):
    """A group's logits, in words of two where ``PACKED``."""
    return group_pairs(start_ptr, num_tokens, group) if PACKED else group_logits(start_ptr, num_tokens, group)


@triton.jit
def _look(loaded, limit, group, PACKED: tl.constexpr, FAST: tl.constexpr):
    """A group's logits [128, 8] float32, the largest of each run and of all, and whether one is not finite."""
    if PACKED:
        words = wanted_pairs(loaded, limit, group)
        tops, largest, is_not_finite = extremes(words, FAST)
        raw, tops = numbers(words), upper_halves(tops)
    else:
        raw = wanted(loaded, limit, group)
        tops = tl.max(raw, 1)
        largest = tl.max(tops, 0)
        is_not_finite = tl.max(tl.where(tl.abs(raw) < float("inf"), 0, 1)) != 0
    return raw, tops, largest, is_not_finite


@triton.jit
def _sum(values):  # [128, 8]
    """Run by run first: a thread adds up four at a time."""
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def _bound(raw, scale, keys, group, FAST: tl.constexpr):
    """Upper bound of the best score of the group in the coupled Gumbel argmax."""
    bits = bits_of(keys, group_runs(group), 0, _STREAM_COUPLED)
    return tl.max(raw * scale + noise_bound(bits, FAST)) + 32.0


@triton.jit(do_not_specialize=["num_rows", "groups_per_part"])
def _group_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    groups_ptr,  # [R, G, 4] float32
    tops_ptr,  # [R, 128 G], the largest logit of each run
    stride,
    num_rows,
    num_tokens,
    num_groups,
    groups_per_part,
    HAS_COUPLED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    PACKED: tl.constexpr,
    IDS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * groups_per_part
    last = tl.minimum(first + groups_per_part, num_groups)
    # The rows' description is there already; the logits are not.
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row), limit_of(rows_ptr, row)
    flags = word(rows_ptr, _FLAGS, row)
    scale, keys = scale_of(rows_ptr, row), keys_of(rows_ptr, row)
    weighs = (flags & (_DRAWS | _ENTROPY | _CUTS)) != 0
    is_coupled = (flags & (_COUPLED | _CUTS)) == _COUPLED
    own_groups_ptr = groups_ptr + row * num_groups * FIELDS
    own_tops_ptr = tops_ptr + row.to(tl.int64) * num_groups * RUNS_PER_GROUP
    present = 0
    if HAS_MARKS:
        start, stop = support_start(rows_ptr, row), support_stop(rows_ptr, row)
        first_ids = support_ids(rows_ptr, num_rows, start, stop, IDS)
        if (flags & (_EXCLUDES | _CUTS)) == _EXCLUDES:
            present = _present(rows_ptr, num_rows, start, stop, first_ids, first, last, IDS)
    if PDL:
        gdc_wait()  # before others may begin: they rely on it that the logits are there when they do
        gdc_launch_dependents()
    # The next group is on its way while one is looked at.
    ahead = _load(start_ptr, num_tokens, first, PACKED)
    for group in range(first, last):
        raw, tops, largest, is_not_finite = _look(ahead, limit, group, PACKED, FAST)
        if group + 1 < last:
            ahead = _load(start_ptr, num_tokens, group + 1, PACKED)
        if HAS_CUTS:
            tl.store(own_tops_ptr + group_runs(group), tops.to(tops_ptr.dtype.element_ty), mask=(flags & _CUTS) != 0)
        total, mass = 0.0 * scale, 0.0 * scale
        bound = total - float("inf")
        if weighs:
            weights = tl.exp2(raw * scale - bounded(largest) * scale)
            total = _sum(weights)
            mass = total
            if HAS_MARKS:
                if ((present >> (group - first)) & 1) != 0:
                    marks = group_marks(rows_ptr, num_rows, start, stop, first_ids, group, IDS)
                    mass = _sum(outside_only(weights, marks, 0.0))
        if HAS_COUPLED:
            if is_coupled:
                bound = _bound(raw, scale, keys, group, FAST)
        store_partials(own_groups_ptr, group, largest, total, mass, bound, is_not_finite)
