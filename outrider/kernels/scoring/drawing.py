# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Device functions of the kernels that answer: the draw by groups and the probabilities of a support."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.scoring.device_functions import (
    NOTHING,
    RUN,
    bits_of,
    bounded,
    group_runs,
    log2_of,
    lowest_at,
    noise,
    support_ids,
)
from outrider.kernels.scoring.rows import Found
from outrider.randomness.streams import Stream

_STREAM_OUTSIDE = tl.constexpr(int(Stream.OUTSIDE))
_STREAM_GROUP = tl.constexpr(int(Stream.OUTSIDE_GROUP))
_FOUND_ALL = tl.constexpr(len(Found))


@triton.jit
def group_gumbel(keys, base, GROUPS: tl.constexpr, FAST: tl.constexpr):
    """The noise of each group in the first stage of a draw, [GROUPS]."""
    bits = bits_of(keys, tl.arange(0, GROUPS // RUN), base, _STREAM_GROUP)
    return noise(tl.reshape(bits, [GROUPS]), FAST)


@triton.jit
def drawn_group(masses, gumbel, FAST: tl.constexpr):
    """The first stage of a draw: a group by the masses [GROUPS], of which one is positive."""
    times = log2_of(tl.where(masses > 0.0, masses, 1.0), FAST) + gumbel
    _, group = tl.max(tl.where(masses > 0.0, times, float("-inf")), 0, return_indices=True)
    return group


@triton.jit
def drawn_token(scores, group):  # [128, 8]
    """The second stage: the Gumbel argmax within a group."""
    # One number for each run first, which moves nothing. (Not by a reshape: Triton takes it for one that may reorder.)
    best, places = tl.max(scores, 1, return_indices=True)
    return lowest_at(best, tl.max(best, 0), group_runs(group) * RUN + places)


@triton.jit
def token_gumbel(keys, base, group, FAST: tl.constexpr):
    """The noise of each token in the second stage of a draw, [128, 8]."""
    return noise(bits_of(keys, group_runs(group), base, _STREAM_OUTSIDE), FAST)


@triton.jit
def support_logits(start_ptr, rows_ptr, num_rows, start, stop, IDS: tl.constexpr):
    """Ids of a support from ``start`` on and their logits; anything past its end."""
    ids = support_ids(rows_ptr, num_rows, start, stop, IDS)
    return ids, tl.load(start_ptr + ids, mask=ids != NOTHING, other=0.0).to(tl.float32)


@triton.jit
def store_probs(found_ptr, scale, num_rows, start, ids, raw, largest, total, IDS: tl.constexpr):
    """Probabilities of a support's ids from ``start`` on by their logits."""
    probs = tl.exp2(raw * scale - bounded(largest) * scale) / total
    places = found_ptr + _FOUND_ALL * num_rows + start + tl.arange(0, IDS)
    tl.store(places, probs.to(tl.int32, bitcast=True), mask=ids != NOTHING)
