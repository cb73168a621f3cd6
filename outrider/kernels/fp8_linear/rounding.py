# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Rounding of activations to FP8 numbers on a GPU: one scale for each row or group of a row, or one that is given.

The kernel that computes an activation rounds it too, where that is a norm or the gate of an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.fp8_linear.layout import FP8, Rounded, Rounding
from outrider.kernels.fp8_linear.reference import Gate
from outrider.kernels.gemv import NormedInput
from outrider.kernels.launching import launch_options
from outrider.kernels.rms_norm.kernel import added_and_normed, num_partials_of
from outrider.kernels.room import empty_rows
from outrider.kernels.swiglu.kernel import gated

_MAX = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-10)
_TILES = (16, 32, 64)
_LARGEST_TILE = 128
"""Rows of the products' tiles, which take much longer if they end beyond what is there."""
_SCALES_ALIGNED = 4
"""Scales of groups of one place lie beside each other, in rows that the library's products load by 16 bytes."""
_GROUPS = 8
"""Groups of a program."""
_WIDE = 4096
"""Rows as long take sixteen warps."""


@triton.jit
def _divided(x, divisor):
    """X / divisor, rounded as a division is, in a sixth of the instructions where many share a divisor."""
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def _store_rounded(
    x, row, first_group, scale_stride, size, num_groups, rounded_ptr, scales_ptr, scale_ptr,
    IS_STATIC: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round groups ``x`` [GROUPS, BLOCK] of a row, zeros beyond its end, each ``GROUP`` long."""
    group = first_group + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + place[None, :]
    inside = (column < size) & (place < GROUP)[None, :]
    if IS_STATIC:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(scale_ptr)
        most = 2.0 * _MAX * scale[:, None]
        x = tl.minimum(tl.maximum(x, -most), most)  # no quotient is infinite, and its remainder no number
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), _LEAST), tl.zeros([GROUPS], tl.float32) + _MAX)
        tl.store(scales_ptr + group * scale_stride + row, scale, mask=group < num_groups)
    scaled = _divided(x, scale[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -_MAX), _MAX)
    numbers = scaled.to(rounded_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(rounded_ptr + row * size + column, numbers, mask=inside)


@triton.jit(do_not_specialize=["scale_stride"])
def _round_kernel(
    x_ptr,  # [T, K], or gates and ups [T, 2 K]
    rounded_ptr,  # [T, K] fp8
    scales_ptr,  # [G, T or more] float32
    scale_ptr,  # [] float32
    scale_stride,
    size,
    num_groups,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a group, rounded up
    GROUPS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * GROUPS
    place = tl.arange(0, BLOCK)
    column = (first + tl.arange(0, GROUPS))[:, None] * GROUP + place[None, :]
    inside = (column < size) & (place < GROUP)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if IS_GATED:
        gates = x_ptr + row * 2 * size + column
        gate, up = tl.load(gates, mask=inside, other=0.0), tl.load(gates + size, mask=inside, other=0.0)
        x = gated(gate, up, IS_GELU, 0.0, 0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    _store_rounded(
        x, row, first, scale_stride, size, num_groups, rounded_ptr, scales_ptr, scale_ptr,
        IS_STATIC, GROUP, GROUPS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_stride"])
def _norm_and_round_kernel(
    x_ptr,  # [T, K]; becomes x + delta
    delta_ptr,  # [NUM_PARTIALS, T, K]
    weight_ptr,  # [K]
    rounded_ptr,  # [T, K] fp8
    scales_ptr,  # [G, T or more] float32
    scale_ptr,  # [] float32
    row_stride,
    partial_stride,
    scale_stride,
    size,
    num_groups,
    eps,
    NUM_PARTIALS: tl.constexpr,
    IS_STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of all groups, rounded up
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = added_and_normed(
        x_ptr, delta_ptr, weight_ptr, row, row_stride, partial_stride, size, eps, NUM_PARTIALS, BLOCK, PDL
    )
    x = tl.reshape(x.to(tl.float32), (GROUPS, BLOCK // GROUPS))
    _store_rounded(
        x, row, 0, scale_stride, size, num_groups, rounded_ptr, scales_ptr, scale_ptr,
        IS_STATIC, GROUP, GROUPS, BLOCK // GROUPS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of a row that share a scale."""

    is_static: bool
    size: int
    count: int

    @classmethod
    def of(cls, rounding: Rounding, size: int) -> _Groups:
        """Groups of rows of ``size``."""
        is_static = rounding.scale is not None
        group = min(128 if is_static else rounding.group or size, size)
        return cls(is_static, group, triton.cdiv(size, group))

    def empty(self, num_tokens: int, size: int, device: torch.device) -> Rounded:
        """Room for numbers and scales."""
        numbers = empty_rows(num_tokens, size, dtype=FP8, device=device, tiles=_TILES, step=_LARGEST_TILE)
        if self.is_static:
            return Rounded(numbers, None)
        stride = -(-num_tokens // _SCALES_ALIGNED) * _SCALES_ALIGNED
        return Rounded(numbers, torch.empty(self.count, stride, dtype=torch.float32, device=device))


def rounded(x: torch.Tensor, rounding: Rounding, gate: Gate | None = None) -> Rounded:
    """``x`` [T, K] as FP8 numbers with scales; with a ``gate`` [T, 2 K] are gates and ups."""
    num_tokens, size = x.shape[0], x.shape[1] // (1 if gate is None else 2)
    if rounding.group is None and rounding.scale is None:
        return Rounded(x, None)
    form = _Groups.of(rounding, size)
    out = form.empty(num_tokens, size, x.device)
    groups = min(_GROUPS, triton.next_power_of_2(form.count))
    if num_tokens:
        _round_kernel[(triton.cdiv(form.count, groups), num_tokens)](
            x, out.numbers, x if out.scales is None else out.scales, x if rounding.scale is None else rounding.scale,
            _stride(out), size, form.count, IS_GATED=gate is not None, IS_GELU=gate is Gate.GELU,
            IS_STATIC=form.is_static, GROUP=form.size, BLOCK=triton.next_power_of_2(form.size), GROUPS=groups,
            num_warps=16 if form.size >= _WIDE else 4, **launch_options(x),
        )  # fmt: skip
    return out


def normed_and_rounded(source: NormedInput, rounding: Rounding) -> Rounded:
    """The norm of ``source`` as FP8 numbers with scales; its sum is written over its stream."""
    x, weight, unused = source.hidden, source.norm_weight, source.norm_weight
    num_tokens, size = x.shape
    form = _Groups.of(rounding, size)
    out = form.empty(num_tokens, size, x.device)
    block = triton.next_power_of_2(size)
    if num_tokens:
        _norm_and_round_kernel[(num_tokens,)](
            x, x if source.delta is None else source.delta, weight, out.numbers,
            unused if out.scales is None else out.scales, unused if rounding.scale is None else rounding.scale,
            x.stride(0), x.numel(), _stride(out), size, form.count, source.eps,
            NUM_PARTIALS=num_partials_of(x, source.delta), IS_STATIC=form.is_static, GROUP=form.size, BLOCK=block,
            GROUPS=1 if form.count == 1 else block // form.size, num_warps=8 if size >= _WIDE // 2 else 4,
            enable_fp_fusion=False, **launch_options(x),
        )  # fmt: skip
    return out


def _stride(rounded: Rounded) -> int:
    return 0 if rounded.scales is None else rounded.scales.shape[1]
