# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``rms_norm`` and the addition before it as one Triton kernel: one program per row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.room import empty_rows

_WIDE = 2048
"""Rows as long take eight warps."""


@triton.jit
def added_and_normed(
    x_ptr, delta_ptr, weight_ptr, row, row_stride, partial_stride, size, eps,
    NUM_PARTIALS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row of x + delta, normalised and in the type of x, zeros beyond its end; the sum is written over x."""
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = row * row_stride + column
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    if NUM_PARTIALS > 0:
        # Rounded as a product that is already added up, so that both forms give the same bits.
        delta = tl.zeros([BLOCK], tl.float32)
        for partial in tl.static_range(NUM_PARTIALS):
            place_of_part = delta_ptr + partial * partial_stride + row * size + column
            delta += tl.load(place_of_part, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + delta.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + place, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    return (wide * scale * weight).to(x.dtype)


@triton.jit
def _norm_kernel(
    x_ptr,  # [T, N]; becomes x + delta
    delta_ptr,  # [NUM_PARTIALS, T, N]
    weight_ptr,  # [N]
    out_ptr,  # [T, N]
    row_stride,
    partial_stride,
    size,
    eps,
    NUM_PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    normed = added_and_normed(
        x_ptr, delta_ptr, weight_ptr, row, row_stride, partial_stride, size, eps, NUM_PARTIALS, BLOCK, PDL
    )
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * size + column, normed, mask=column < size)


def num_partials_of(x: torch.Tensor, delta: torch.Tensor | None) -> int:
    """Partial sums [A, T, N] in ``delta``, for ``x`` [T, N]."""
    return 0 if delta is None else delta.numel() // max(x.numel(), 1)


class TritonNorm:
    """RMS norm with one weight on a GPU."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight  # [N]
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., N] to the same shape."""
        return self._launch(x, None)

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` [T, N], or all of float32 [A, T, N], to ``x`` [T, N] in place and normalize the sum."""
        return self._launch(x, delta)

    def _launch(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        size = self._weight.numel()
        if not x.numel():
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = x.view(-1, size)
        out = empty_rows(*rows.shape, dtype=x.dtype, device=x.device)
        _norm_kernel[(rows.shape[0],)](
            rows, x if delta is None else delta, self._weight, out, rows.stride(0), x.numel(), size, self._eps,
            NUM_PARTIALS=num_partials_of(x, delta), BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size >= _WIDE else 4, enable_fp_fusion=False, **launch_options(x),
        )  # fmt: skip
        return out.view(x.shape)
