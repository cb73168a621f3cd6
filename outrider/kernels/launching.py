"""Launch options of Triton kernels: in order, each allowed to start before its predecessor ends.

A kernel launched with ``PDL`` (programmatic dependent launch, compute capability 9.0 and later) may start while the
kernel before it still runs. Every program of such a kernel waits (``gdc_wait``) before it reads what another kernel
writes; weights, which no kernel writes, may be fetched earlier.
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
    """True if Triton kernels run on this device: on a GPU, and on a CPU with Triton's interpreter, for tests."""
    return device.type == "cuda" or _interprets()


def launch_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of every launch on this tensor's device."""
    if launches_early(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def launches_early(device: torch.device) -> bool:
    """True if the GPU can start a kernel before its predecessor ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@functools.cache
def num_processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Maximum shared memory of one program in bytes."""
    if device.type != "cuda":
        return _CPU_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - _SYSTEM_BYTES


def stages_within(wanted: int, stage_bytes: int, device: torch.device) -> int:
    """Stages of a pipelined loop: as many as wanted, or as shared memory holds; at least one."""
    return max(1, min(wanted, shared_bytes(device) // stage_bytes))


@functools.cache
def _interprets() -> bool:
    """Triton reads the variable itself, once, when a kernel's module is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
