# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``gated_delta`` and ``gated_norm`` as Triton kernels.

A program follows the tokens of one row and one head, one by one, over a block of the head's values: replayed tokens and
new ones alike, with one order of sums. So a state has the same bits however its tokens were divided among forwards.
Queries, keys and values of a few tokens are computed at once, and wait in registers. A warp alone needs no barriers.
Nothing depends on how many rows, tokens of a row or replayed tokens there are, so one launch fits every batch.

Rows of more tokens than the log holds, which are prompts, are computed by ``chunks`` where ``DeltaRows.in_chunks`` says
so; only the tokens that they replay are followed here. The form depends on a row's own tokens, not on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.gated_delta.chunks import follow_chunks
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

_VALUES = 32
"""Values of a head that a program follows: enough programs for one row of a model to fill a GPU."""
_TOKENS = 4
"""Tokens whose channels are computed at once."""
_COLUMNS = 1024
"""Inputs that a program copies to the log."""


@triton.jit
def _channels_of(own_ptr, replayed_ptr, position, kept, first, row, channels, LOG: tl.constexpr):
    """Pointers to the channels of a row's tokens at ``position``: own ones [T, C], and replayed ones [B, R, C]."""
    own, replayed = own_ptr + (first + position - kept) * channels, row.to(tl.int64) * LOG + position % LOG
    return tl.where(position >= kept, own, replayed_ptr + replayed * channels)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _convolve_kernel(
    inputs_ptr,  # [T, N]
    logs_ptr,  # [S, R, N]
    own_ptr,  # [T, C] float32
    replayed_ptr,  # [B, R, C] float32
    query_starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    token_slots_ptr,  # [T]
    slots_ptr,  # [B]
    starts_ptr,  # [B]
    taps_ptr,  # [C, TAPS] float32
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LOG: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)  # heads of queries, of keys, of values
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, slot = tokens_of(query_starts_ptr, token_slots_ptr, slots_ptr, row)
    if slot < 0:
        return
    length, start = tl.load(lengths_ptr + row).to(tl.int64), tl.load(starts_ptr + row).to(tl.int64)
    kept = length - count
    channels = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    size = channels + 2 * NUM_HEADS
    log_ptr = logs_ptr + slot * LOG * size
    is_query, is_value = head < NUM_KEY_HEADS, head >= 2 * NUM_KEY_HEADS
    place = tl.arange(0, WIDTH)[None, :]
    value_column = 2 * NUM_KEY_HEADS * KEY_DIM + (head - 2 * NUM_KEY_HEADS) * VALUE_DIM
    column = tl.where(is_value, value_column, head * KEY_DIM) + place
    is_column = place < tl.where(is_value, VALUE_DIM, KEY_DIM)
    last = tl.where(IN_CHUNKS & (count > LOG), kept, length)
    for begin in range(tl.where(is_query, kept, start), last, TOKENS):
        position = begin + tl.arange(0, TOKENS)[:, None]
        is_token = position < last
        found = convolved(inputs_ptr, log_ptr, taps_ptr, position, kept, first, column, is_token, is_column, size, LOG,
                          TAPS)  # fmt: skip
        if not is_value:
            found = of_length_1(found)
        if is_query:
            found = found / (KEY_DIM**0.5)
        target = _channels_of(own_ptr, replayed_ptr, position, kept, first, row, channels, LOG)
        tl.store(target + column, found, mask=is_token & is_column)


@triton.jit
def _token_at(
    inputs_ptr, log_ptr, row_ptr, position, kept, first, is_token, queries, keys, values, is_key, is_value, gates, size,
    NUM_HEADS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Query, key, value, and the inputs of rate and decay of the token at ``position``, whose channels are at
    ``row_ptr``; a replayed one has no query.
    """
    is_own = is_token & (position >= kept)
    query = tl.load(row_ptr + queries, mask=is_key & is_own, other=0.0)
    key = tl.load(row_ptr + keys, mask=is_key & is_token, other=0.0)
    value = tl.load(row_ptr + values, mask=is_value & is_token, other=0.0)
    rate = input_at(inputs_ptr, log_ptr, position, kept, first, gates, is_token, size, LOG)
    wide = input_at(inputs_ptr, log_ptr, position, kept, first, gates + NUM_HEADS, is_token, size, LOG)
    return query, key, value, rate, wide


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _delta_kernel(
    inputs_ptr,  # [T, N]
    states_ptr,  # [S, H, K, V] float32
    logs_ptr,  # [S, R, N]
    own_ptr,  # [T, C] float32
    replayed_ptr,  # [B, R, C] float32
    out_ptr,  # [T, H, V] float32
    query_starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    token_slots_ptr,  # [T]
    slots_ptr,  # [B]
    starts_ptr,  # [B]
    ends_ptr,  # [B]
    decay_ptr,  # [H] float32
    bias_ptr,  # [H] float32
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LOG: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    head, row = tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, slot = tokens_of(query_starts_ptr, token_slots_ptr, slots_ptr, row)
    if slot < 0:
        return
    length = tl.load(lengths_ptr + row).to(tl.int64)
    start, end = tl.load(starts_ptr + row).to(tl.int64), tl.load(ends_ptr + row).to(tl.int64)
    kept = length - count
    channels = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    size = channels + 2 * NUM_HEADS
    key = tl.arange(0, KEYS)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    queries = (head // (NUM_HEADS // NUM_KEY_HEADS)) * KEY_DIM + key
    keys = queries + NUM_KEY_HEADS * KEY_DIM
    values = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    log_ptr = logs_ptr + slot * LOG * size
    places = (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    in_state = is_key[:, None] & is_value[None, :]
    state = tl.load(states_ptr + places, mask=in_state & (start > 0), other=0.0)
    slope, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
    is_long = IN_CHUNKS & (count > LOG)
    last = tl.where(is_long, kept, length)
    row_ptr = _channels_of(own_ptr, replayed_ptr, start, kept, first, row, channels, LOG)
    next_q, next_k, next_v, next_rate, next_wide = _token_at(
        inputs_ptr, log_ptr, row_ptr, start, kept, first, start < last, queries, keys, values, is_key, is_value,
        channels + head, size, NUM_HEADS, LOG,
    )  # fmt: skip
    for token in range(start, last):
        q, k, v, rate, wide = next_q, next_k, next_v, rate_of(next_rate), next_wide
        # The next token's are loaded while this one is computed.
        row_ptr = _channels_of(own_ptr, replayed_ptr, token + 1, kept, first, row, channels, LOG)
        next_q, next_k, next_v, next_rate, next_wide = _token_at(
            inputs_ptr, log_ptr, row_ptr, token + 1, kept, first, token + 1 < last, queries, keys, values, is_key,
            is_value, channels + head, size, NUM_HEADS, LOG,
        )  # fmt: skip
        state = state * tl.exp(decay_of(wide, slope, bias))
        state += k[:, None] * (rate * (v - tl.sum(state * k[:, None], 0)))[None, :]
        if token + 1 == end:
            tl.store(states_ptr + places, state, mask=in_state)
        if token >= kept:
            place = (first + token - kept) * NUM_HEADS + head
            tl.store(out_ptr + place * VALUE_DIM + value, tl.sum(state * q[:, None], 0), mask=is_value)
    if is_long:
        tl.store(states_ptr + places, state, mask=in_state)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _log_kernel(
    inputs_ptr,  # [T, N]
    logs_ptr,  # [S, R, N]
    query_starts_ptr,  # [B + 1]
    lengths_ptr,  # [B]
    token_slots_ptr,  # [T]
    slots_ptr,  # [B]
    size,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = column < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, slot = tokens_of(query_starts_ptr, token_slots_ptr, slots_ptr, row)
    last, length = first + count, tl.load(lengths_ptr + row).to(tl.int64)
    if slot >= 0:
        for token in range(tl.maximum(first, last - LOG), last):
            content = tl.load(inputs_ptr + token * size + column, mask=inside)
            place = slot * LOG + (length - last + token) % LOG
            tl.store(logs_ptr + place * size + column, content, mask=inside)


@triton.jit
def _gated_norm_kernel(
    x_ptr,  # [T, H, V] float32
    gate_ptr,  # [T, H V], rows ``stride`` apart
    weight_ptr,  # [V]
    out_ptr,  # [T, H, V]
    query_starts_ptr,  # [B + 1]
    num_rows,
    stride,
    eps,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    value = tl.arange(0, VALUES)
    inside = value < VALUE_DIM
    weight = tl.load(weight_ptr + value, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    has_row = token < tl.load(query_starts_ptr + num_rows)  # what fills a shape up has no outputs
    place = (token * NUM_HEADS + head) * VALUE_DIM + value
    x = tl.load(x_ptr + place, mask=inside & has_row, other=0.0)
    gate = tl.load(gate_ptr + token * stride + head * VALUE_DIM + value, mask=inside, other=0.0)
    normed = (x / tl.sqrt(tl.sum(x * x) / VALUE_DIM + eps)).to(gate.dtype) * weight
    wide = gate.to(tl.float32)
    gated = normed.to(tl.float32) * wide / (1.0 + tl.exp(-wide))
    tl.store(out_ptr + place, tl.where(has_row, gated, 0.0).to(gate.dtype), mask=inside)


def gated_delta(
    inputs: torch.Tensor,
    slots: DeltaSlots,
    rows: DeltaRows,
    weights: DeltaWeights,
    shape: DeltaShape,
) -> torch.Tensor:
    """See the contract; outputs of tokens without a row are not written."""
    states, logs = slots
    num_rows, num_inputs, log_length = len(rows.slots), inputs.shape[1], logs.shape[1]
    out = torch.empty(len(inputs), shape.num_heads, shape.value_dim, dtype=torch.float32, device=inputs.device)
    if not len(inputs) or not num_rows:
        return out
    values, log_shape = min(_VALUES, triton.next_power_of_2(shape.value_dim)), (num_rows, log_length)
    own, replayed = (
        torch.empty(*sizes, shape.num_channels, dtype=torch.float32, device=inputs.device)
        for sizes in ((len(inputs),), log_shape)
    )
    width = max(shape.key_dim, shape.value_dim)
    sizes = {"NUM_HEADS": shape.num_heads, "NUM_KEY_HEADS": shape.num_key_heads, "KEY_DIM": shape.key_dim,
             "VALUE_DIM": shape.value_dim, "LOG": log_length, "IN_CHUNKS": rows.in_chunks}  # fmt: skip
    _convolve_kernel[2 * shape.num_key_heads + shape.num_heads, num_rows](
        inputs, logs, own, replayed, rows.query_starts, rows.context_lengths, rows.token_slots, rows.slots, rows.starts,
        weights.taps, TAPS=shape.num_taps, WIDTH=triton.next_power_of_2(width), TOKENS=_TOKENS, num_warps=1,
        **sizes, **launch_options(inputs),
    )  # fmt: skip
    _delta_kernel[triton.cdiv(shape.value_dim, values), shape.num_heads, num_rows](
        inputs, states, logs, own, replayed, out, rows.query_starts, rows.context_lengths, rows.token_slots,
        rows.slots, rows.starts, rows.ends, weights.decay, weights.bias,
        KEYS=triton.next_power_of_2(shape.key_dim), VALUES=values, num_warps=1, **sizes, **launch_options(inputs),
    )  # fmt: skip
    if rows.in_chunks:
        follow_chunks(inputs, slots, rows, weights, shape, out)
    _log_kernel[triton.cdiv(num_inputs, _COLUMNS), num_rows](
        inputs, logs, rows.query_starts, rows.context_lengths, rows.token_slots, rows.slots, num_inputs, LOG=log_length,
        BLOCK=_COLUMNS,
        **launch_options(inputs),
    )  # fmt: skip
    return out


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, rows: DeltaRows) -> torch.Tensor:
    """See the contract."""
    count, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if count:
        _gated_norm_kernel[num_heads, count](
            x, gate, weight, out, rows.query_starts, len(rows.slots), gate.stride(0), eps, NUM_HEADS=num_heads,
            VALUE_DIM=size, VALUES=triton.next_power_of_2(size), num_warps=1 if size <= 128 else 4,
            **launch_options(x),
        )  # fmt: skip
    return out
