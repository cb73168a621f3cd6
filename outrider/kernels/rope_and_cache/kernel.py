# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``apply_rope_and_cache`` as one Triton kernel: a program takes some heads of one token, in two halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.fp8_linear.layout import FP8
from outrider.kernels.launching import launch_options
from outrider.kernels.rope_and_cache.numbers import angles_at, store_halves, store_in_cache
from outrider.kernels.rope_and_cache.reference import CosSin, HeadLayout

MANY_TOKENS = 128
"""Tokens from which on programs of few heads of a token are too many."""


@triton.jit
def _sum_of(place, inside, partial_stride, NUM_PARTIALS: tl.constexpr):
    total = tl.load(place, mask=inside, other=0.0)
    for partial in tl.static_range(1, NUM_PARTIALS):
        total += tl.load(place + partial * partial_stride, mask=inside, other=0.0)
    return total


@triton.jit
def _normed(first, second, weights, weighted, eps, HEAD_DIM: tl.constexpr):
    """Halves of heads [H, D/2] after their RMSNorm; ``weights``: pointers to those of the first halves."""
    scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
    first = first * scale * tl.load(weights, mask=weighted, other=0.0).to(tl.float32)
    second = second * scale * tl.load(weights + HEAD_DIM // 2, mask=weighted, other=0.0).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "rows_ptr"])
def _rope_and_cache_kernel(
    qkv_ptr,  # [NUM_PARTIALS, T, H + 2 H_kv, D]
    queries_ptr,  # [T, H, D], rows query_stride apart
    kv_ptr,  # [S, 2, H_kv, D]
    slots_ptr,  # [T]
    cos_ptr,  # [R, D]
    sin_ptr,  # [R, D]
    rows_ptr,  # [T]
    norm_weight_ptr,  # [H + H_kv, D]
    partial_stride,
    query_stride,
    eps,
    inverse_key_scale,  # of FP8; None: both are 1
    inverse_value_scale,
    NUM_PARTIALS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_HALF)
    is_rotated = head < NUM_ROTATED
    if PDL:
        gdc_launch_dependents()
    cos, sin = angles_at(cos_ptr, sin_ptr, rows_ptr, token, half, half < HALF, HAS_ROWS, HEAD_DIM)
    cos, sin = cos[None, :], sin[None, :]
    slot = tl.load(slots_ptr + token).to(tl.int64)

    if PDL:
        gdc_wait()
    inside = (head < NUM_ROTATED + NUM_KV_HEADS)[:, None] & (half < HALF)[None, :]
    within_head = head[:, None] * HEAD_DIM + half[None, :]
    place = qkv_ptr + token * (NUM_ROTATED + NUM_KV_HEADS) * HEAD_DIM + within_head
    stored_first = _sum_of(place, inside, partial_stride, NUM_PARTIALS).to(queries_ptr.dtype.element_ty)
    stored_second = _sum_of(place + HALF, inside, partial_stride, NUM_PARTIALS).to(queries_ptr.dtype.element_ty)
    first, second = stored_first.to(tl.float32), stored_second.to(tl.float32)
    if HAS_NORM:
        weighted = is_rotated[:, None] & inside
        first, second = _normed(first, second, norm_weight_ptr + within_head, weighted, eps, HEAD_DIM)
    dtype = stored_first.dtype
    rotated_first = tl.where(is_rotated[:, None], (first * cos - second * sin).to(dtype), stored_first)
    rotated_second = tl.where(is_rotated[:, None], (second * cos + first * sin).to(dtype), stored_second)

    is_query = (head < NUM_HEADS)[:, None] & inside
    store_halves(queries_ptr + token * query_stride + within_head, rotated_first, rotated_second, is_query, HALF)
    kept = (head >= NUM_HEADS)[:, None] & inside & (slot >= 0)
    destination = kv_ptr + slot * 2 * NUM_KV_HEADS * HEAD_DIM + within_head - NUM_HEADS * HEAD_DIM
    store_in_cache(
        destination, rotated_first, rotated_second, is_rotated[:, None], inverse_key_scale, inverse_value_scale, kept,
        HALF,
    )  # fmt: skip


def apply_rope_and_cache(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: CosSin,
    heads: HeadLayout,
    *,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    num_all = heads.num_heads + 2 * heads.num_kv_heads
    num_partials, num_tokens = qkv.shape[0] if qkv.dim() == 3 else 1, qkv.shape[-2]
    partials = qkv.view(num_partials, num_tokens, num_all, heads.head_dim)
    queries = partials[0, :, : heads.num_heads]  # [T, H, D]
    dtype = cos_sin.cos.dtype if kv.dtype == FP8 else kv.dtype
    if qkv.dtype != dtype:
        queries = torch.empty(queries.shape, dtype=dtype, device=qkv.device)
    num_heads, num_warps = (16, 4) if num_tokens >= MANY_TOKENS else (4, 1)  # of a program
    if num_tokens:
        _rope_and_cache_kernel[(num_tokens, triton.cdiv(num_all, num_heads))](
            qkv, queries, kv, slots, cos_sin.cos, cos_sin.sin,
            slots if cos_sin.rows is None else cos_sin.rows,
            qkv if norm_weight is None else norm_weight,
            partials.stride(0), queries.stride(0), heads.eps, *heads.inverse_scales, NUM_PARTIALS=num_partials,
            NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim,
            HAS_ROWS=cos_sin.rows is not None, HAS_NORM=norm_weight is not None,
            BLOCK_H=num_heads, BLOCK_HALF=triton.next_power_of_2(heads.head_dim // 2),
            num_warps=num_warps, enable_fp_fusion=False, **launch_options(qkv),
        )  # fmt: skip
    return queries
