# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""A row's tokens and their inputs in a Triton program, and the causal convolution of these."""

from __future__ import annotations

import triton
import triton.language as tl

INDICES = ["query_starts_ptr", "lengths_ptr", "token_slots_ptr", "slots_ptr", "starts_ptr", "ends_ptr"]
"""Arguments that are read number by number from wherever they lie: no kernel of its own for each alignment."""


@triton.jit
def tokens_of(query_starts_ptr, token_slots_ptr, slots_ptr, row):
    """First token, number of tokens and state slot of a row; the slot is negative if nothing is to be computed."""
    first = tl.load(query_starts_ptr + row).to(tl.int64)
    count = tl.load(query_starts_ptr + row + 1) - first
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_padding = tl.load(token_slots_ptr + first, mask=count > 0, other=-1) < 0
    return first, count, tl.where(is_padding, -1, slot)


@triton.jit
def input_at(inputs_ptr, log_ptr, position, kept, first, column, inside, size, LOG: tl.constexpr):
    """Inputs of the tokens at ``position`` [P, 1] in ``column`` [N], float32: of the row's own from ``kept`` on, of
    those before from the log.
    """
    own, logged = inputs_ptr + (first + position - kept) * size, log_ptr + (position % LOG) * size
    rows = tl.where(position >= kept, own, logged)
    return tl.load(rows + column, mask=inside & (position >= 0), other=0.0).to(tl.float32)


@triton.jit
def silu(x):
    """Sigmoid linear unit."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def rate_of(x):
    """Rate b of the delta rule, from its input."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def decay_of(x, slope, bias):
    """Decay g of the delta rule, from its input: ``slope`` times softplus."""
    wide = x + bias
    return slope * tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(tl.minimum(wide, 20.0))))


@triton.jit
def convolved(inputs_ptr, log_ptr, taps_ptr, position, kept, first, column, is_token, is_column, size,
              LOG: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """Silu of the causal convolution at ``position`` [P, 1] in ``column`` [1, N] where ``is_token`` and ``is_column``,
    else 0.
    """
    inside = is_token & is_column
    total = tl.zeros(inside.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        before = position - (TAPS - 1) + tap
        weights = tl.load(taps_ptr + column * TAPS + tap, mask=is_column, other=0.0)
        total += weights * input_at(inputs_ptr, log_ptr, before, kept, first, column, inside, size, LOG)
    return silu(total)


@triton.jit
def of_length_1(rows):
    """``rows`` [P, N], each over its length."""
    return rows / tl.sqrt(tl.sum(rows * rows, 1) + 1e-6)[:, None]
