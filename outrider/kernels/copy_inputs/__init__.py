"""Copy of a launch's inputs: numbers that the host put into pinned memory come to the device.

Contract: ``box [1 + N]`` int32, in memory that host and device both reach, holds a count n of at most N and then n
numbers. They come to ``out[:n]``, and the count becomes 0 when all were read: the host may then leave the next ones.
Whatever is launched afterwards, early or not, finds the numbers in their place before it begins.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels

__all__ = ["copy_inputs"]


def copy_inputs(box: torch.Tensor, out: torch.Tensor) -> None:
    """Copy ``box`` [1 + N] int32 to ``out`` [N] int32 on the device, and mark the box as read."""
    if has_kernels(out.device):
        from outrider.kernels.copy_inputs import kernel  # Triton is slow to import

        kernel.copy_inputs(box, out)
        return
    count = int(box[0])
    out[:count] = box[1 : 1 + count]
    box[0] = 0
