# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``embedding`` as one Triton kernel: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _look_up_kernel(
    ids_ptr,  # [T]
    table_ptr,  # [V, N]
    out_ptr,  # [T, N]
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(ids_ptr + row).to(tl.int64) * size + column
    tl.store(out_ptr + row * size + column, tl.load(table_ptr + place, mask=column < size), mask=column < size)


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See the contract."""
    rows, size = ids.shape[0], table.shape[1]
    out = torch.empty(rows, size, dtype=table.dtype, device=table.device)
    if rows:
        _look_up_kernel[(rows,)](
            ids, table, out, size, BLOCK=triton.next_power_of_2(size), num_warps=4, **launch_options(table)
        )
    return out
