# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Rounding of activations to FP8 numbers on a GPU: one scale for each row or group of a row, or one that is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.fp8_linear.layout import FP8, Rounding
from outrider.kernels.launching import launch_options
from outrider.kernels.room import empty_rows

_MAX = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-10)
_TILES = (16, 32, 64)
_LARGEST_TILE = 128
"""Rows of the products' tiles, which take much longer if they end beyond what is there."""
_GROUPS = 8
"""Groups of a program."""
_WIDE = 4096
"""Rows as long take sixteen warps."""


@triton.jit(do_not_specialize=["num_tokens"])
def _round_kernel(
    x_ptr,  # [T, K]
    rounded_ptr,  # [T, K] fp8
    scales_ptr,  # [G, T] float32
    scale_ptr,  # [] float32
    num_tokens,
    size,
    num_groups,
    IS_STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a group, rounded up
    GROUPS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + place[None, :]
    inside = (column < size) & (place < GROUP)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(scale_ptr)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), _LEAST), tl.zeros([GROUPS], tl.float32) + _MAX)
        tl.store(scales_ptr + group * num_tokens + row, scale, mask=group < num_groups)
    scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], [GROUPS, BLOCK]))
    scaled = tl.minimum(tl.maximum(scaled, -_MAX), _MAX)
    numbers = scaled.to(rounded_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(rounded_ptr + row * size + column, numbers, mask=inside)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rounded activations."""

    numbers: torch.Tensor  # [T, K] fp8, or x itself where it is not rounded
    scales: torch.Tensor | None  # [G, T] float32; None: the scale is part of the weight's, or there is none


def rounded(x: torch.Tensor, rounding: Rounding) -> Rounded:
    """``x`` [T, K] as FP8 numbers with scales."""
    num_tokens, size = x.shape
    if rounding.group is None and rounding.scale is None:
        return Rounded(x, None)
    is_static = rounding.scale is not None
    group = 128 if is_static else min(rounding.group or size, size)
    num_groups = triton.cdiv(size, group)
    numbers = empty_rows(num_tokens, size, dtype=FP8, device=x.device, tiles=_TILES, step=_LARGEST_TILE)
    scales = None
    if not is_static:
        scales = torch.empty(num_groups, num_tokens, dtype=torch.float32, device=x.device)
    groups = min(_GROUPS, triton.next_power_of_2(num_groups))
    if num_tokens:
        _round_kernel[(triton.cdiv(num_groups, groups), num_tokens)](
            x, numbers, x if scales is None else scales, x if rounding.scale is None else rounding.scale,
            num_tokens, size, num_groups, IS_STATIC=is_static, GROUP=group, BLOCK=triton.next_power_of_2(group),
            GROUPS=groups, num_warps=16 if group >= _WIDE else 4, **launch_options(x),
        )  # fmt: skip
    return Rounded(numbers, scales)
