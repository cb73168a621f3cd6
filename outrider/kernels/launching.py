"""How Triton kernels are launched: over whole tensors, in order, each allowed to begin before its predecessor ends.

A kernel launched with ``PDL`` (programmatic dependent launch, compute capability 9.0 and later) may be placed on the
device while the kernel before it still runs. All that are launched so wait (``gdc_wait``) in every program before they
touch what another kernel writes; weights, which nothing writes, they may fetch sooner.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

_FIRST_CAPABILITY = (9, 0)
_CPU_PROCESSORS = 8
"""A few, so that work is cut into parts in the interpreter too."""
_CPU_SHARED_BYTES = 1 << 30
_SYSTEM_BYTES = 1 << 10


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run there: on a GPU, and on a CPU where Triton interprets them, to be tested."""
    return device.type == "cuda" or _interprets()


def launch_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of every launch on this tensor's device."""
    if launches_early(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether a GPU can place a kernel before the one ahead of it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have: on a GPU all of a multiprocessor's but what the system keeps."""
    if device.type != "cuda":
        return _CPU_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - _SYSTEM_BYTES


@functools.cache
def _interprets() -> bool:
    """Triton reads the variable itself, once, when a kernel's module is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
