# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``gemv`` as Triton kernels.

A program holds a few whole rows of its weight in registers. It asks for all of them before it waits for the kernel
ahead, so that memory goes on being read from one kernel to the next; then come the token, which is small, and one sum
along the rows. Whole rows are what lets every program normalise the token for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.gemv.layout import Matrix, NormedInput
from outrider.kernels.launching import launch_options
from outrider.kernels.rope_and_cache.numbers import angles_at, store_halves, store_in_cache
from outrider.kernels.rope_and_cache.reference import CosSin, HeadLayout

_SHORT = 4096
"""Rows of weights up to so long take four warps."""


@triton.jit
def _weight_rows(weight_ptr, row, is_row, column, in_row, size):
    place = tl.where(is_row, row, 0).to(tl.int64)[:, None] * size + column[None, :]
    return tl.load(weight_ptr + place, mask=is_row[:, None] & in_row[None, :], other=0.0)


@triton.jit
def _along_rows(weight, x, bias_ptr, row, is_row, HAS_BIAS: tl.constexpr):
    """Rows [N, K] by x [K]: [N] float32."""
    total = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    return total


@triton.jit
def _add_and_norm(hidden_ptr, delta_ptr, sum_ptr, scale, token, column, in_row, size, eps, HAS_DELTA: tl.constexpr):
    """The token's normalised sum [K] float32; the first program keeps the sum."""
    place = token * size + column
    hidden = tl.load(hidden_ptr + place, mask=in_row, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + place, mask=in_row, other=0.0)
        hidden = (hidden.to(tl.float32) + delta.to(tl.float32)).to(hidden.dtype)
        if tl.program_id(0) == 0:
            tl.store(sum_ptr + place, hidden, mask=in_row)
    wide = hidden.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    return (wide * factor * scale).to(hidden.dtype).to(tl.float32)


@triton.jit
def _product_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    size,
    num_rows,
    NUM_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    column = tl.arange(0, BLOCK_K)
    in_row = column < size
    if PDL:
        gdc_launch_dependents()
    weight = _weight_rows(weight_ptr, row, is_row, column, in_row, size)
    if PDL:
        gdc_wait()
    for token in tl.static_range(NUM_TOKENS):
        x = tl.load(x_ptr + token * size + column, mask=in_row, other=0.0).to(tl.float32)
        y = _along_rows(weight, x, bias_ptr, row, is_row, HAS_BIAS)
        tl.store(y_ptr + token * num_rows + row, y.to(y_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _gated_kernel(
    hidden_ptr,  # [T, K]
    delta_ptr,  # [T, K]
    norm_weight_ptr,  # [K]
    weight_ptr,  # [2 N, K]
    bias_ptr,  # [2 N]
    sum_ptr,  # [T, K]
    out_ptr,  # [T, N]
    size,
    num_rows,
    eps,
    NUM_TOKENS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    column = tl.arange(0, BLOCK_K)
    in_row = column < size
    if PDL:
        gdc_launch_dependents()
    gate_rows = _weight_rows(weight_ptr, row, is_row, column, in_row, size)
    up_rows = _weight_rows(weight_ptr, num_rows + row, is_row, column, in_row, size)
    scale = tl.load(norm_weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for token in tl.static_range(NUM_TOKENS):
        x = _add_and_norm(hidden_ptr, delta_ptr, sum_ptr, scale, token, column, in_row, size, eps, HAS_DELTA)
        gate = _along_rows(gate_rows, x, bias_ptr, row, is_row, HAS_BIAS)
        up = _along_rows(up_rows, x, bias_ptr, num_rows + row, is_row, HAS_BIAS)
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + token * num_rows + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "rows_ptr"])
def _qkv_rope_kernel(
    hidden_ptr,  # [T, K]
    delta_ptr,  # [T, K]
    norm_weight_ptr,  # [K]
    weight_ptr,  # [H + 2 H_kv, D, K]
    bias_ptr,  # [H + 2 H_kv, D]
    sum_ptr,  # [T, K]
    query_ptr,  # [T, H, D]
    kv_ptr,  # [S, 2, H_kv, D]
    slots_ptr,  # [T]
    cos_ptr,  # [R, D]
    sin_ptr,  # [R, D]
    rows_ptr,  # [T]
    size,
    eps,
    inverse_key_scale,  # of FP8; None: both are 1
    inverse_value_scale,
    NUM_TOKENS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    PROGRAMS: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N  # of one head
    head = tl.program_id(0) // PROGRAMS
    place = tl.program_id(0) % PROGRAMS * BLOCK_N + tl.arange(0, BLOCK_N)
    is_place = place < HALF
    column = tl.arange(0, BLOCK_K)
    in_row = column < size
    first_row = head * HEAD_DIM + place
    if PDL:
        gdc_launch_dependents()
    first_rows = _weight_rows(weight_ptr, first_row, is_place, column, in_row, size)
    second_rows = _weight_rows(weight_ptr, first_row + HALF, is_place, column, in_row, size)
    scale = tl.load(norm_weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for token in tl.static_range(NUM_TOKENS):
        x = _add_and_norm(hidden_ptr, delta_ptr, sum_ptr, scale, token, column, in_row, size, eps, HAS_DELTA)
        first = _along_rows(first_rows, x, bias_ptr, first_row, is_place, HAS_BIAS)
        second = _along_rows(second_rows, x, bias_ptr, first_row + HALF, is_place, HAS_BIAS)
        is_rotated = head < NUM_HEADS + NUM_KV_HEADS
        if is_rotated:
            cos, sin = angles_at(cos_ptr, sin_ptr, rows_ptr, token, place, is_place, HAS_ROWS, HEAD_DIM)
            first, second = first * cos - second * sin, second * cos + first * sin
        if head < NUM_HEADS:
            store_halves(query_ptr + (token * NUM_HEADS + head) * HEAD_DIM + place, first, second, is_place, HALF)
        else:
            slot = tl.load(slots_ptr + token).to(tl.int64)
            stored = kv_ptr + (slot * 2 * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + place
            # FP8 numbers are rounded from what a wider cache holds.
            store_in_cache(stored, first.to(dtype), second.to(dtype), is_rotated, inverse_key_scale,
                           inverse_value_scale, is_place & (slot >= 0), HALF)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GemvTiling:
    """Tile sizes of a product."""

    num_elements: int
    """Elements of a weight that a program holds."""
    num_warps: int


def choose_tiling(size: int) -> GemvTiling:
    """Choose tile sizes for a weight [N, size]; measured in whole draft loops of a 1B shape on an H200."""
    return GemvTiling(1 << 14, 4 if size <= _SHORT else 8)


def product(x: torch.Tensor, matrix: Matrix, *, tiling: GemvTiling | None = None) -> torch.Tensor:
    """See the contract."""
    (num_tokens, size), num_rows = x.shape, matrix.weight.shape[0]
    tiling = tiling or choose_tiling(size)
    y = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    block_n, block_k = _blocks(tiling, size, 1)
    _product_kernel[(triton.cdiv(num_rows, block_n),)](
        x, matrix.weight, _bias(matrix), y, size, num_rows,
        NUM_TOKENS=num_tokens, HAS_BIAS=matrix.bias is not None, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=tiling.num_warps, **launch_options(x),
    )  # fmt: skip
    return y


def gated(
    source: NormedInput, matrix: Matrix, *, tiling: GemvTiling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    hidden, (num_tokens, size), num_rows = source.hidden, source.hidden.shape, matrix.weight.shape[0] // 2
    tiling = tiling or choose_tiling(size)
    out = torch.empty(num_tokens, num_rows, dtype=hidden.dtype, device=hidden.device)
    total = _room_for_sum(source)
    block_n, block_k = _blocks(tiling, size, 2)
    _gated_kernel[(triton.cdiv(num_rows, block_n),)](
        hidden, _delta(source), source.norm_weight, matrix.weight, _bias(matrix), total, out,
        size, num_rows, source.eps,
        NUM_TOKENS=num_tokens, HAS_DELTA=source.delta is not None, HAS_BIAS=matrix.bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=tiling.num_warps, **launch_options(hidden),
    )  # fmt: skip
    return total, out


def qkv_with_rope(
    source: NormedInput,
    matrix: Matrix,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos_sin: CosSin,
    heads: HeadLayout,
    tiling: GemvTiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    hidden, (num_tokens, size) = source.hidden, source.hidden.shape
    tiling = tiling or choose_tiling(size)
    query = torch.empty(num_tokens, heads.num_heads, heads.head_dim, dtype=hidden.dtype, device=hidden.device)
    total = _room_for_sum(source)
    block_n, block_k = _blocks(tiling, size, 2)
    num_heads = heads.num_heads + 2 * heads.num_kv_heads
    _qkv_rope_kernel[(num_heads * triton.cdiv(heads.head_dim // 2, block_n),)](
        hidden, _delta(source), source.norm_weight, matrix.weight, _bias(matrix), total, query, kv, slots,
        cos_sin.cos, cos_sin.sin, slots if cos_sin.rows is None else cos_sin.rows, size, source.eps,
        *heads.inverse_scales,
        NUM_TOKENS=num_tokens, HAS_DELTA=source.delta is not None, HAS_BIAS=matrix.bias is not None,
        HAS_ROWS=cos_sin.rows is not None,
        NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=tiling.num_warps, **launch_options(hidden),
    )  # fmt: skip
    return total, query


def _blocks(tiling: GemvTiling, size: int, num_parts: int) -> tuple[int, int]:
    """Rows of each of a program's parts, and columns."""
    block_k = triton.next_power_of_2(size)
    return max(1, tiling.num_elements // block_k // num_parts), block_k


def _bias(matrix: Matrix) -> torch.Tensor:
    return matrix.weight if matrix.bias is None else matrix.bias


def _delta(source: NormedInput) -> torch.Tensor:
    return source.hidden if source.delta is None else source.delta


def _room_for_sum(source: NormedInput) -> torch.Tensor:
    return source.hidden if source.delta is None else torch.empty_like(source.hidden)
