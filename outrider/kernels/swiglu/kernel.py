# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``swiglu`` as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.room import empty_rows

_BLOCK = 1024


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Gate times up, in the type of ``gate``; ``ALPHA`` 0: not clamped."""
    wide = gate.to(tl.float32)
    if IS_GELU:  # x * sigmoid(2 u) is x * (1 + tanh(u)) / 2
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
        product = wide / (1.0 + tl.exp(-inner)) * up.to(tl.float32)
    elif ALPHA > 0.0:
        wide = tl.minimum(wide, LIMIT)
        bounded = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT)
        product = wide / (1.0 + tl.exp(-ALPHA * wide)) * (bounded + 1.0)
    else:
        product = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    return product.to(gate.dtype)


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [T, 2 N]
    out_ptr,  # [T, N]
    size,
    IS_GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + column, gated(gate, up, IS_GELU, ALPHA, LIMIT), mask=inside)


def swiglu(gate_up: torch.Tensor, *, is_gelu: bool = False, clamp: tuple[float, float] = (0.0, 0.0)) -> torch.Tensor:
    """``gate_up`` [T, 2 N] to [T, N]; ``is_gelu``: ``geglu``; ``clamp``: alpha and limit of ``clamped_swiglu``."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (triton.cdiv(size, _BLOCK), rows)
        _swiglu_kernel[grid](
            gate_up, out, size, IS_GELU=is_gelu, ALPHA=clamp[0], LIMIT=clamp[1], BLOCK=_BLOCK,
            **launch_options(gate_up),
        )  # fmt: skip
    return out
