# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``store_heads`` as one Triton kernel: one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    keys_ptr,  # [T, H_kv, D], strides of tokens and heads are given
    values_ptr,  # [T, H_kv, D]
    slots_ptr,  # [T]
    kv_ptr,  # [S, 2, H_kv, D]
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    num_heads,
    head_dim,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        head, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
        inside = (head < num_heads) & (d < head_dim)
        place = kv_ptr + slot * (2 * num_heads * head_dim) + head * head_dim + d
        keys = tl.load(keys_ptr + token * key_stride + head * key_head_stride + d, mask=inside, other=0.0)
        values = tl.load(values_ptr + token * value_stride + head * value_head_stride + d, mask=inside, other=0.0)
        tl.store(place, keys.to(kv_ptr.dtype.element_ty), mask=inside)
        tl.store(place + num_heads * head_dim, values.to(kv_ptr.dtype.element_ty), mask=inside)


def store_heads(kv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """See ``kv_store``."""
    keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in (keys, values))
    num_tokens, num_heads, head_dim = keys.shape
    if num_tokens:
        _store_kernel[(num_tokens,)](
            keys, values, slots, kv, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            num_heads, head_dim, BLOCK_H=triton.next_power_of_2(num_heads), BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=4, **launch_options(kv),
        )  # fmt: skip
