# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Partial results of each group: four numbers next to each other, written by one store and read by one load.

They are the largest logit; the sum of all weights beside it, its sign set where a logit is not finite; that of the
weights outside the support; and a bound on the best score of the coupled Gumbel argmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.scoring.device_functions import bounded

NUM_FIELDS = 4
FIELDS = tl.constexpr(NUM_FIELDS)
_SIGN = tl.constexpr(-(2**31))


@triton.jit
def store_partials(own_groups_ptr, group, largest, total, mass, bound, is_not_finite):
    """Store the partial results of one group of the row that begins at ``own_groups_ptr``."""
    fields = tl.arange(0, FIELDS)
    bits = (total.to(tl.int32, bitcast=True) & ~_SIGN) | tl.where(is_not_finite, _SIGN, 0)
    total = bits.to(tl.float32, bitcast=True)
    values = tl.where(fields < 2, tl.where(fields == 0, largest, total), tl.where(fields == 2, mass, bound))
    tl.store(own_groups_ptr + group * FIELDS + fields, values)


@triton.jit
def load_partials(own_groups_ptr, num_groups, GROUPS: tl.constexpr):
    """Partial results of all groups of a row, each [GROUPS]: -inf and 0 past the last; and 1 where a logit is not
    finite.
    """
    groups, fields = tl.arange(0, GROUPS), tl.arange(0, FIELDS)
    places = groups[:, None] * FIELDS + fields[None, :]
    shares = groups < num_groups
    values = tl.load(own_groups_ptr + places, mask=shares[:, None], other=0.0)
    evens, odds = tl.split(tl.reshape(values, [GROUPS, 2, 2]))
    largest, mass = tl.split(evens)
    total, bound = tl.split(odds)
    bits = total.to(tl.int32, bitcast=True)
    total = (bits & ~_SIGN).to(tl.float32, bitcast=True)
    infinity = float("-inf")
    return tl.where(shares, largest, infinity), total, mass, tl.where(shares, bound, infinity), (bits < 0).to(tl.int32)


@triton.jit
def shrinks(tops, largest, scale):
    """Scale of a group's weights relative to the row's largest logit.

    Products as in the group kernel: their rounding is then no difference between groups.
    """
    return tl.exp2(bounded(tops) * scale - bounded(largest) * scale)
