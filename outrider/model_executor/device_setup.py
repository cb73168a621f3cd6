"""Device setup: availability of a device, a model's type on it, and the number of threads.

Owns the choices that are made before anything is loaded.
"""

from __future__ import annotations

import os
from typing import TypedDict

import torch

from outrider.errors import ConfigError

_SAFE_CPU_ISA = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
"""Virtual machines have been seen that announce AMX and then stop a process at its first AMX instruction, which
bfloat16 products would use. AVX-512 does them too; the variable, where it is set, decides."""

_CPU_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""Compiled products that oneDNN, and torch's layer above it, keep: one of some 0.7 MiB for each number of rows and each
shape of a weight. By default they keep 1,024 each, and a service grows by hundreds of MiB as it meets batch sizes. 128
are those of some 25 batch sizes; a further one costs some milliseconds."""


class DeviceFacts(TypedDict):
    """Device fields of a ``ModelDescription``."""

    device: str
    device_id: str
    """A GPU's UUID, by which a coordinator finds that two services share it; empty for a CPU."""
    device_name: str
    """The GPU's; empty for a CPU."""


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a device for the description of any service that computes on it."""
    if device.type != "cuda":
        return DeviceFacts(device=str(device), device_id="", device_name="")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return DeviceFacts(device=str(device), device_id=uuid, device_name=torch.cuda.get_device_name(device))


def resolve_device(device: str, num_ranks: int = 1) -> str:
    """The device that "auto" stands for on this host: a GPU where torch can use one, else the CPU.

    ``ConfigError`` for a model that several ranks share and a host without a GPU, unless the device is cpu.
    """
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    if num_ranks > 1:
        raise ConfigError(
            "tensor_parallel_size",
            f"is {num_ranks}, and torch finds no GPU; with device cpu so many processes compute there",
        )
    return "cpu"


def prepare_device(device: str, dtype: str, num_threads: int | None) -> str:
    """Check the device and set the number of threads; returns the type to load, "auto" being float32 on a CPU.

    ``ConfigError`` when the device is not there.
    """
    chosen = _device(device)
    if chosen.type == "cuda":
        _require_cuda(chosen)
    else:
        for name, value in (_SAFE_CPU_ISA, *_CPU_CACHES.items()):
            os.environ.setdefault(name, value)  # read once, at the first product
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return "float32" if dtype == "auto" and chosen.type == "cpu" else dtype


def keep_to_set_threads() -> None:
    """Have the calling thread compute with as many threads as ``prepare_device`` has set.

    The setting reaches a thread with the first parallel loop of torch's own. Matrix products before that would start a
    thread for each processor, which on busy processors wait for each other.
    """
    torch.get_num_threads()  # for what it does: it reads the setting into this thread


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} should be auto, cpu, cuda or cuda:N") from error


def _require_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("device", f"{device} is set, but there is no CUDA device; cpu is available")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"{device} is set, but there are {torch.cuda.device_count()} CUDA devices")
