# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``rotary_store`` as one Triton kernel: a program takes some heads of one token, in two halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.rope_and_cache.layout import Angles, HeadLayout

_HEADS_PER_PROGRAM = 4


@triton.jit
def _sum_of(place, inside, addend_stride, ADDENDS: tl.constexpr):
    total = tl.load(place, mask=inside, other=0.0)
    for addend in tl.static_range(1, ADDENDS):
        total += tl.load(place + addend * addend_stride, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "rows_ptr"])
def _turn_and_store_kernel(
    qkv_ptr,  # [ADDENDS, T, H + 2 H_kv, D]
    queries_ptr,  # [T, H, D], rows query_stride apart
    kv_ptr,  # [S, 2, H_kv, D]
    slots_ptr,  # [T]
    cos_ptr,  # [R, D]
    sin_ptr,  # [R, D]
    rows_ptr,  # [T]
    norm_weight_ptr,  # [H + H_kv, D]
    addend_stride,
    query_stride,
    eps,
    ADDENDS: tl.constexpr,
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
    NUM_TURNED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_HALF)
    is_turned = head < NUM_TURNED
    if PDL:
        gdc_launch_dependents()
    row = tl.load(rows_ptr + token).to(tl.int64) if HAS_ROWS else token
    cos = tl.load(cos_ptr + row * HEAD_DIM + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slots_ptr + token).to(tl.int64)

    if PDL:
        gdc_wait()
    inside = (head < NUM_TURNED + NUM_KV_HEADS)[:, None] & (half < HALF)[None, :]
    within_head = head[:, None] * HEAD_DIM + half[None, :]
    place = qkv_ptr + token * (NUM_TURNED + NUM_KV_HEADS) * HEAD_DIM + within_head
    stored_first = _sum_of(place, inside, addend_stride, ADDENDS).to(kv_ptr.dtype.element_ty)
    stored_second = _sum_of(place + HALF, inside, addend_stride, ADDENDS).to(kv_ptr.dtype.element_ty)
    first, second = stored_first.to(tl.float32), stored_second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
        weighted = is_turned[:, None] & inside
        first = first * scale * tl.load(norm_weight_ptr + within_head, mask=weighted, other=0.0).to(tl.float32)
        second = second * scale * tl.load(norm_weight_ptr + within_head + HALF, mask=weighted, other=0.0).to(tl.float32)
    dtype = stored_first.dtype
    turned_first = tl.where(is_turned[:, None], (first * cos - second * sin).to(dtype), stored_first)
    turned_second = tl.where(is_turned[:, None], (second * cos + first * sin).to(dtype), stored_second)

    is_query = (head < NUM_HEADS)[:, None] & inside
    query = queries_ptr + token * query_stride + within_head
    tl.store(query, turned_first, mask=is_query)
    tl.store(query + HALF, turned_second, mask=is_query)
    kept = (head >= NUM_HEADS)[:, None] & inside & (slot >= 0)
    destination = kv_ptr + slot * 2 * NUM_KV_HEADS * HEAD_DIM + within_head - NUM_HEADS * HEAD_DIM
    tl.store(destination, turned_first, mask=kept)
    tl.store(destination + HALF, turned_second, mask=kept)


def turn_and_store(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    angles: Angles,
    heads: HeadLayout,
    *,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    num_all = heads.num_heads + 2 * heads.num_kv_heads
    num_addends, num_tokens = qkv.shape[0] if qkv.dim() == 3 else 1, qkv.shape[-2]
    addends = qkv.view(num_addends, num_tokens, num_all, heads.head_dim)
    queries = addends[0, :, : heads.num_heads]  # [T, H, D]
    if qkv.dtype != kv.dtype:
        queries = torch.empty(queries.shape, dtype=kv.dtype, device=qkv.device)
    if num_tokens:
        _turn_and_store_kernel[(num_tokens, triton.cdiv(num_all, _HEADS_PER_PROGRAM))](
            qkv, queries, kv, slots, angles.cos, angles.sin,
            slots if angles.rows is None else angles.rows,
            qkv if norm_weight is None else norm_weight,
            addends.stride(0), queries.stride(0), heads.eps, ADDENDS=num_addends,
            NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim,
            HAS_ROWS=angles.rows is not None, HAS_NORM=norm_weight is not None,
            BLOCK_H=_HEADS_PER_PROGRAM, BLOCK_HALF=triton.next_power_of_2(heads.head_dim // 2),
            num_warps=1, **launch_options(qkv),
        )  # fmt: skip
    return queries
