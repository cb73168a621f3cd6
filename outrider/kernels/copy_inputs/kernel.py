# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``copy_inputs`` as one Triton kernel of one program: the numbers are few, and latency dominates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from outrider.kernels.launching import launch_options

_BLOCK = 2048


@triton.jit
def _copy_inputs_kernel(
    box_ptr,  # [1 + N]
    numbers_ptr,  # [N]
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    # Volatile: what lies in the host's memory is not to be had from a cache.
    count = tl.load(box_ptr, volatile=True)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(box_ptr + 1 + place, mask=place < count, other=0, volatile=True)
        tl.store(numbers_ptr + place, numbers, mask=place < count)
    tl.debug_barrier()  # all of the program's threads have read
    tl.store(box_ptr, 0)


def copy_inputs(box: torch.Tensor, out: torch.Tensor) -> None:
    """See the contract."""
    _copy_inputs_kernel[(1,)](box, out, BLOCK=_BLOCK, num_warps=8, **launch_options(out))
    # Kernels that are placed early read positions, slots and pages before they wait, and each waits for its predecessor
    # alone. None is placed ahead of an ordinary launch, which this is.
    out.new_empty(1).zero_()
