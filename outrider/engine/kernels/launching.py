"""How Triton kernels are launched: over whole tensors, in order, each allowed to begin before its predecessor ends.

A kernel launched with ``PDL`` (programmatic dependent launch, compute capability 9.0 and later) may be placed on the
device while the kernel before it still runs. All that are launched so wait (``gdc_wait``) in every program before they
touch what another kernel writes; weights, which nothing writes, they may fetch sooner.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_FIRST_CAPABILITY = (9, 0)


def launch_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of every launch on this tensor's device."""
    if tensor.is_cuda and launches_early(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether a GPU can place a kernel before the one ahead of it ends."""
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
