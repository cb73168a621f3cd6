# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, PLR0917, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""What the kernels that answer share: the draw by groups and the probabilities of a support."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.scoring.device_functions import (
    NOTHING,
    base_of,
    bits_of,
    bounded,
    group_logits,
    group_marks,
    group_runs,
    limit_of,
    log2_of,
    lowest_at,
    noise,
    outside_only,
    row_start,
    run_ids,
    scale_of,
    support_ids,
    support_start,
    uncut,
    wanted,
)
from outrider.engine.kernels.scoring.rows import Found
from outrider.randomness.streams import Stream

_STREAM_OUTSIDE = tl.constexpr(int(Stream.OUTSIDE))
_STREAM_GROUP = tl.constexpr(int(Stream.OUTSIDE_GROUP))
_FOUND_ALL = tl.constexpr(len(Found))


@triton.jit
def group_lots(rows_ptr, row, num_rows, GROUPS: tl.constexpr, FAST: tl.constexpr):
    """The noise of each group in the first stage of a draw, [GROUPS]."""
    base = base_of(rows_ptr, row, num_rows)
    bits = bits_of(rows_ptr, row, num_rows, tl.arange(0, GROUPS // 8), base, row * 0 + _STREAM_GROUP)
    return noise(tl.reshape(bits, [GROUPS]), FAST)


@triton.jit
def drawn(logits_ptr, stride, num_tokens, rows_ptr, masses, lots, least, last, row, num_rows, excludes,
          HAS_MARKS: tl.constexpr, HAS_CUTS: tl.constexpr, GROUPS: tl.constexpr, IDS: tl.constexpr,
          FAST: tl.constexpr):  # fmt: skip
    """A token by the masses [GROUPS]: first the group, then the token in it."""
    times = log2_of(tl.where(masses > 0.0, masses, 1.0), FAST) + lots
    times = tl.where(masses > 0.0, times, float("-inf"))
    group = lowest_at(times, tl.max(times, 0), tl.arange(0, GROUPS))
    runs, ids = group_runs(group), run_ids(group_runs(group))
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row, num_rows), limit_of(rows_ptr, row, num_rows)
    raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
    if HAS_CUTS:
        raw = uncut(raw, least, last, ids)
    base = base_of(rows_ptr, row, num_rows)
    bits = bits_of(rows_ptr, row, num_rows, runs, base, row * 0 + _STREAM_OUTSIDE)
    scores = raw * scale_of(rows_ptr, row, num_rows) + noise(bits, FAST)
    if HAS_MARKS:
        if excludes:
            first_ids = support_ids(rows_ptr, row, num_rows, support_start(rows_ptr, row, num_rows), IDS)
            marks = group_marks(rows_ptr, row, num_rows, first_ids, group, IDS)
            scores = outside_only(scores, marks, float("-inf"))
    return lowest_at(scores, tl.max(scores), ids)


@triton.jit
def support_logits(logits_ptr, stride, rows_ptr, row, num_rows, start, IDS: tl.constexpr):
    """Ids of the row's support from ``start`` on and their logits; anything past its end."""
    ids = support_ids(rows_ptr, row, num_rows, start, IDS)
    logits = tl.load(row_start(logits_ptr, stride, rows_ptr, row, num_rows) + ids, mask=ids != NOTHING, other=0.0)
    return ids, logits.to(tl.float32)


@triton.jit
def store_probs(found_ptr, rows_ptr, row, num_rows, start, ids, raw, largest, total, IDS: tl.constexpr):
    """Probabilities of a support's ids from ``start`` on by their logits."""
    scale = scale_of(rows_ptr, row, num_rows)
    probs = tl.exp2(raw * scale - bounded(largest) * scale) / total
    places = found_ptr + _FOUND_ALL * num_rows + start + tl.arange(0, IDS)
    tl.store(places, probs.to(tl.int32, bitcast=True), mask=ids != NOTHING)
