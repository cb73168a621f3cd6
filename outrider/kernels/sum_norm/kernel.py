# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``sum_norm`` as one Triton kernel: a program a row shows its own, waits for the others', adds and normalises.

All programs of a launch are on the device before any that comes after them, so that none waits for one that has no
place. The next kernel is placed, and fetches its weights, while these wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.rms_norm.kernel import _WIDE
from outrider.kernels.sum_norm import SharedRows, flag_bytes


@triton.jit
def _rows_at(address, FLAG_BYTES: tl.constexpr, dtype: tl.constexpr):
    """The rows of a buffer, which are aligned so that several values are fetched at once."""
    return tl.multiple_of((address + FLAG_BYTES).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _sum_norm_kernel(
    x_ptr,  # [T, N]; becomes x + the sum of parts
    part_ptr,  # [T, N]
    weight_ptr,  # [N]
    out_ptr,  # [T, N]
    addresses_ptr,  # [SIZE] int64
    rounds_ptr,  # [ROWS] int32
    size,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    place = row.to(tl.int64) * size + column
    part = tl.load(part_ptr + place, mask=inside, other=0.0)
    this_round = tl.load(rounds_ptr + row) + 1
    shown = ((this_round & 1) * ROWS + row).to(tl.int64) * size + column
    own = tl.load(addresses_ptr + RANK)
    tl.store(_rows_at(own, FLAG_BYTES, x_ptr.dtype.element_ty) + shown, part, mask=inside)
    tl.debug_barrier()  # all of the row is there before its flag says so
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + row * SIZE + RANK, this_round, sem="release", scope="sys")
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    own_flags = own.to(tl.pointer_type(tl.int32)) + row * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            while tl.atomic_add(own_flags + peer, 0, sem="acquire", scope="sys") - this_round < 0:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += part.to(tl.float32)
        else:
            rows = _rows_at(tl.load(addresses_ptr + peer), FLAG_BYTES, x_ptr.dtype.element_ty)
            # Past the first-level cache, which does not see what others wrote.
            total += tl.load(rows + shown, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    x = (x.to(tl.float32) + total.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(x_ptr + place, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(out_ptr + place, (wide * scale * weight).to(x.dtype), mask=inside)
    tl.store(rounds_ptr + row, this_round)


def sum_and_norm(
    x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float, shared: SharedRows
) -> torch.Tensor:
    """Add every rank's ``part`` [T, N] to ``x`` [T, N] in place and normalise the sum by ``weight`` [N]."""
    out = torch.empty_like(x)
    size = weight.numel()
    _sum_norm_kernel[(x.shape[0],)](
        x, part, weight, out, shared.addresses, shared.rounds, size, eps,
        RANK=shared.rank, SIZE=shared.size, ROWS=shared.max_rows,
        FLAG_BYTES=flag_bytes(shared.max_rows, shared.size), BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size >= _WIDE else 4, enable_fp_fusion=False, **launch_options(x),
    )  # fmt: skip
    return out
