# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Gated delta rule over chunks of a row's tokens: the WY form of ``reference``, for prompts.

Chunks begin at a row's first token. One kernel computes, for each chunk and head at once, what does not depend on a
state: queries, keys and values, the scores between them, and the inverse of the triangular system over the keys. A
second one follows the chunks of a row, for each head and a block of its values, with the state at hand: five matrix
products a chunk. Both skip the rows that have no more tokens than the log holds.

Products of 16-bit models round their factors to tf32, those of float32 models do not.

Shape letters: ``C`` tokens of a chunk; others as in ``layout``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.gated_delta.convolution import (
    INDICES,
    convolved,
    decay_of,
    input_at,
    of_length_1,
    rate_of,
    tokens_of,
)
from outrider.kernels.gated_delta.layout import DeltaRows, DeltaShape, DeltaSlots, DeltaWeights
from outrider.kernels.launching import launch_options

_LEVELS = 6
"""Halvings of a chunk of 64 tokens, whose system is inverted by halves."""
_VALUES = 32
"""Values of a head that a program of the second kernel follows."""
_ROWS = 256
"""Rows that are looked through at once; more need a kernel of their own."""
_LEAST = 16
"""Least size of every side of a matrix product."""


@triton.jit
def _find_chunk(query_starts_ptr, chunk, num_rows, LOG: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """Row of the ``chunk``-th chunk of all, and its number in that row; ``num_rows`` or more if there are fewer."""
    r = tl.arange(0, ROWS)
    counts = tl.load(query_starts_ptr + r + 1, mask=r < num_rows, other=0)
    counts -= tl.load(query_starts_ptr + r, mask=r < num_rows, other=0)
    chunks = tl.where(counts > LOG, tl.cdiv(counts, C), 0)
    ends = tl.cumsum(chunks)
    row = tl.sum((ends <= chunk).to(tl.int32))
    return row, chunk - tl.sum(tl.where(r == row, ends - chunks, 0))


@triton.jit
def _inverse(lower, LEVELS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of 1 + ``lower`` [C, C], which is strictly lower triangular: of blocks of twice the size at each level.
    No power of ``lower`` is taken, whose numbers may be large where those of the inverse are not.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where((i % 2 == 1) & (j == i - 1), -lower, 0.0))
    for level in range(1, LEVELS):
        below = ((i >> level) % 2 == 1) & ((j >> level) == (i >> level) - 1)
        left = tl.dot(tl.where(below, lower, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, left, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=INDICES)
def _chunk_kernel(
    inputs_ptr,  # [T, N]
    logs_ptr,  # [S, R, N]
    queries_ptr,  # [T, G, K] float32, of length K ** -0.5
    keys_ptr,  # [T, G, K] float32, of length 1
    values_ptr,  # [T, H, V] float32
    systems_ptr,  # [T, H, C] float32: what each token writes, from what the chunk's tokens want
    weights_ptr,  # [T, H, C] float32: of what the chunk's tokens have written, in the output
    sums_ptr,  # [T, H] float32: of decays from the chunk's beginning on
    query_starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    token_slots_ptr,  # [T]
    slots_ptr,  # [B]
    taps_ptr,  # [C, TAPS] float32
    decay_ptr,  # [H] float32
    bias_ptr,  # [H] float32
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LOG: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = 1 << LEVELS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, number = _find_chunk(query_starts_ptr, tl.program_id(1), num_rows, LOG, C, ROWS)
    if row >= num_rows:
        return
    first, count, slot = tokens_of(query_starts_ptr, token_slots_ptr, slots_ptr, row)
    if slot < 0:
        return
    kept = tl.load(lengths_ptr + row).to(tl.int64) - count
    size = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM + 2 * NUM_HEADS
    log_ptr = logs_ptr + slot * LOG * size
    own = number * C + tl.arange(0, C)
    is_token = own < count
    token, position = first + own, kept + own
    key, value = tl.arange(0, KEYS)[None, :], tl.arange(0, VALUES)[None, :]
    in_keys, in_values = is_token[:, None] & (key < KEY_DIM), is_token[:, None] & (value < VALUE_DIM)
    at, to = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    gates = size - 2 * NUM_HEADS + head
    rate = rate_of(input_at(inputs_ptr, log_ptr, position, kept, first, gates, is_token, size, LOG))
    wide = input_at(inputs_ptr, log_ptr, position, kept, first, gates + NUM_HEADS, is_token, size, LOG)
    decay = decay_of(wide, tl.load(decay_ptr + head), tl.load(bias_ptr + head))
    rate, sums = tl.where(is_token, rate, 0.0), tl.cumsum(tl.where(is_token, decay, 0.0))
    tl.store(sums_ptr + token * NUM_HEADS + head, sums, mask=is_token)
    between = tl.exp(tl.where(at >= to, sums[:, None] - sums[None, :], float("-inf")))

    columns = (head // GROUP) * KEY_DIM + key
    places = token[:, None] * NUM_KEY_HEADS * KEY_DIM + columns
    is_first = in_keys & (head % GROUP == 0)
    k = convolved(inputs_ptr, log_ptr, taps_ptr, position[:, None], kept, first, columns + NUM_KEY_HEADS * KEY_DIM,
                  is_token[:, None], key < KEY_DIM, size, LOG, TAPS)  # fmt: skip
    k = of_length_1(k)
    tl.store(keys_ptr + places, k, mask=is_first)
    lower = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * rate[:, None]
    system = _inverse(tl.where(at > to, lower, 0.0), LEVELS, C, PRECISION) * rate[None, :]
    squares = (token[:, None] * NUM_HEADS + head) * C + to
    tl.store(systems_ptr + squares, system, mask=is_token[:, None])

    q = convolved(inputs_ptr, log_ptr, taps_ptr, position[:, None], kept, first, columns,
                  is_token[:, None], key < KEY_DIM, size, LOG, TAPS)  # fmt: skip
    q = of_length_1(q) / (KEY_DIM**0.5)
    tl.store(queries_ptr + places, q, mask=is_first)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    tl.store(weights_ptr + squares, scores, mask=is_token[:, None])

    columns = head * VALUE_DIM + value
    v = convolved(inputs_ptr, log_ptr, taps_ptr, position[:, None], kept, first, columns + 2 * NUM_KEY_HEADS * KEY_DIM,
                  is_token[:, None], value < VALUE_DIM, size, LOG, TAPS)  # fmt: skip
    tl.store(values_ptr + token[:, None] * NUM_HEADS * VALUE_DIM + columns, v, mask=in_values)


@triton.jit
def _moved(state, k, written, sums, count, C: tl.constexpr, PRECISION: tl.constexpr):
    """State [K, V] after the first ``count`` tokens of a chunk."""
    at = tl.arange(0, C)
    last = tl.sum(tl.where(at == count - 1, sums, 0.0))
    left = tl.exp(tl.where(at < count, last - sums, float("-inf")))
    return state * tl.exp(last) + tl.dot(tl.trans(k * left[:, None]), written, input_precision=PRECISION)


@triton.jit
def _written(state, k, v, systems_ptr, square, is_token, sums, PRECISION: tl.constexpr):
    """Writes of a chunk's tokens: the solution of its system for what they want, beside what the state has."""
    wanted = v - tl.dot(k, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
    system = tl.load(systems_ptr + square, mask=is_token[:, None], other=0.0)
    return tl.dot(system, wanted, input_precision=PRECISION)


@triton.jit
def _found(state, q, written, weights_ptr, square, is_token, sums, PRECISION: tl.constexpr):
    """Outputs of a chunk's tokens, from the state before it and what they have written."""
    found = tl.dot(q, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
    weights = tl.load(weights_ptr + square, mask=is_token[:, None], other=0.0)
    return tl.dot(weights, written, found, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _follow_kernel(
    queries_ptr,  # as ``_chunk_kernel`` has them
    keys_ptr,
    values_ptr,
    systems_ptr,
    weights_ptr,
    sums_ptr,
    states_ptr,  # [S, H, K, V] float32: after the tokens before the row's own
    out_ptr,  # [T, H, V] float32
    query_starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    token_slots_ptr,  # [T]
    slots_ptr,  # [B]
    ends_ptr,  # [B]
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LOG: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = 1 << LEVELS
    head, row = tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, slot = tokens_of(query_starts_ptr, token_slots_ptr, slots_ptr, row)
    if slot < 0 or count <= LOG:
        return
    end = tl.load(ends_ptr + row) - (tl.load(lengths_ptr + row) - count)
    value, key = tl.program_id(0) * VALUES + tl.arange(0, VALUES)[None, :], tl.arange(0, KEYS)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    in_state = is_key[:, None] & is_value
    places = (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value
    state = tl.load(states_ptr + places, mask=in_state, other=0.0)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    at = tl.arange(0, C)
    for begin in range(0, count, C):
        is_token = begin + at < count
        token = (first + begin + at)[:, None]
        sums = tl.load(sums_ptr + (first + begin + at) * NUM_HEADS + head, mask=is_token, other=0.0)
        in_keys, in_values = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value
        columns, square = key_head * KEY_DIM + key[None, :], (token * NUM_HEADS + head) * C + at[None, :]
        k = tl.load(keys_ptr + token * NUM_KEY_HEADS * KEY_DIM + columns, mask=in_keys, other=0.0)
        v_places = (token * NUM_HEADS + head) * VALUE_DIM + value
        v = tl.load(values_ptr + v_places, mask=in_values, other=0.0)
        written = _written(state, k, v, systems_ptr, square, is_token, sums, PRECISION)
        q = tl.load(queries_ptr + token * NUM_KEY_HEADS * KEY_DIM + columns, mask=in_keys, other=0.0)
        found = _found(state, q, written, weights_ptr, square, is_token, sums, PRECISION)
        tl.store(out_ptr + v_places, found, mask=in_values)
        if (begin < end) & (end <= begin + C):
            ended = _moved(state, k, written, sums, end - begin, C, PRECISION)
            tl.store(states_ptr + places, ended, mask=in_state)
        state = _moved(state, k, written, sums, tl.minimum(count - begin, C), C, PRECISION)


def follow_chunks(
    inputs: torch.Tensor,
    slots: DeltaSlots,
    rows: DeltaRows,
    weights: DeltaWeights,
    shape: DeltaShape,
    out: torch.Tensor,
) -> None:
    """Outputs [T, H, V] and states of the rows with more tokens than the log holds, whose slots have the states after
    the tokens before these.
    """
    (states, logs), num_tokens, num_rows = slots, len(inputs), len(rows.slots)
    num_keys, width, log_length = shape.num_key_heads, 1 << _LEVELS, logs.shape[1]

    def scratch(*size: int) -> torch.Tensor:
        return torch.empty(num_tokens, *size, dtype=torch.float32, device=inputs.device)

    queries, keys = scratch(num_keys, shape.key_dim), scratch(num_keys, shape.key_dim)
    parts = (
        queries, keys, scratch(shape.num_heads, shape.value_dim), scratch(shape.num_heads, width),
        scratch(shape.num_heads, width), scratch(shape.num_heads),
    )  # fmt: skip
    sizes = {
        "NUM_HEADS": shape.num_heads, "NUM_KEY_HEADS": num_keys, "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim, "LOG": log_length, "LEVELS": _LEVELS,
        "KEYS": max(_LEAST, triton.next_power_of_2(shape.key_dim)),
        "PRECISION": "tf32x3" if inputs.dtype == torch.float32 else "tf32",
        "num_warps": 8, "num_stages": 1, **launch_options(inputs),
    }  # fmt: skip
    all_values = max(_LEAST, triton.next_power_of_2(shape.value_dim))
    most_chunks = num_tokens // width + min(num_rows, num_tokens // (log_length + 1))
    _chunk_kernel[shape.num_heads, most_chunks](
        inputs, logs, *parts, rows.query_starts, rows.context_lengths, rows.token_slots, rows.slots, weights.taps,
        weights.decay, weights.bias, num_rows, TAPS=shape.num_taps, VALUES=all_values,
        ROWS=max(_ROWS, triton.next_power_of_2(num_rows)), **sizes,
    )  # fmt: skip
    values = min(_VALUES, all_values)
    _follow_kernel[triton.cdiv(shape.value_dim, values), shape.num_heads, num_rows](
        *parts, states, out, rows.query_starts, rows.context_lengths, rows.token_slots, rows.slots, rows.ends,
        VALUES=values, **sizes,
    )  # fmt: skip
