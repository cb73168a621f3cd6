"""Batch invariance: where outputs can be made independent of what is computed with them.

The rule: for a layer's shape the order of every sum is fixed. It does not depend on the number of rows, a row's place
among them, or the chunks in which a text was computed. ``linear`` and ``paged_attention`` have kernels of their own for
it. Norms, rotary embedding, activation, embedding and sampling compute row by row in any mode. Ranks are added up in
their order.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels

_CAPABILITY = (9, 0)
"""The matrix unit on which the bits of all tiles were compared."""


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why outputs depend on the batch here, as the end of a sentence; None: they need not."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "its kernels were compared bit by bit on GPUs of compute capability 9.0 (H100, H200) alone"
    if not has_kernels(device):
        return "it needs a GPU; on a CPU products of float32 depend on the number of rows in the last bits"
    if device.type == "cuda" and dtype.itemsize != 2:
        return f"it needs bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    return None
