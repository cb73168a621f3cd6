"""How many KV pages a model gets.

Owns the arithmetic between bytes, tokens and pages and the defaults by device. Refuses to know sequences and tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import ConfigError

_log = logging.getLogger(__name__)

_DEFAULT_SEQUENCES = 64
_CPU_SHARE, _CPU_LIMIT_BYTES = 0.25, 4 << 30
_CUDA_SHARE, _MOST_OF_FREE = 0.85, 0.95
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True, slots=True)
class KvRequest:
    """What the pool is to be sized by."""

    page_size: int
    max_model_len: int
    bytes_per_token: int
    num_pages: int | None
    """Taken as it is."""
    kv_cache_bytes: int | None
    """Otherwise as many pages as fit."""
    gpu_memory_utilization: float | None = None
    """Otherwise what is left of this share of the GPU's memory; with none of them, a share of what is free."""


def choose_num_pages(request: KvRequest, device: torch.device) -> int:
    """The number of pages; ``ConfigError`` when a budget does not even hold one sequence of ``max_model_len``."""
    if request.page_size < 1:
        raise ConfigError("page_size", f"must be at least 1, not {request.page_size}")
    num_pages = request.num_pages if request.num_pages is not None else _pages_by_bytes(request, device)
    if num_pages < 1:
        raise ConfigError("num_pages", f"must be at least 1, not {num_pages}")
    page_bytes = request.page_size * request.bytes_per_token
    _log.info(
        "KV cache: %d pages of %d tokens, %.1f MiB on %s",
        num_pages, request.page_size, num_pages * page_bytes / 2**20, device,
    )  # fmt: skip
    return num_pages


@contextlib.contextmanager
def naming_what_lacks(device: torch.device) -> Iterator[None]:
    """Turn the device's refusal of memory into a ``ConfigError`` that says what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (count / 2**30 for count in torch.cuda.mem_get_info(device))
        raise ConfigError(
            "gpu_memory_utilization",
            f"weights, CUDA graphs and KV cache do not fit: {free:.1f} of the {total:.1f} GiB of {device} are free. "
            "Services that share a GPU each need a part of it: set gpu_memory_utilization or kv_cache_bytes of both",
        ) from error


def _pages_by_bytes(request: KvRequest, device: torch.device) -> int:
    page_bytes = request.page_size * request.bytes_per_token
    needed = -(-request.max_model_len // request.page_size)
    if request.kv_cache_bytes is not None:
        num_pages = request.kv_cache_bytes // page_bytes
    else:
        num_pages = min(_default_bytes(request, device) // page_bytes, needed * _DEFAULT_SEQUENCES)
    if num_pages < needed:
        raise ConfigError(
            "kv_cache_bytes" if request.gpu_memory_utilization is None else "gpu_memory_utilization",
            f"{num_pages * page_bytes} bytes hold {num_pages * request.page_size} tokens, fewer than max_model_len "
            f"{request.max_model_len}, which needs {needed * page_bytes} bytes: give more or lower max_model_len",
        )
    return int(num_pages)


def _default_bytes(request: KvRequest, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if request.gpu_memory_utilization is None:
            return int(free * _CUDA_SHARE)
        # What this process holds, not what is gone: the rest may be another service's, which counts its own.
        left = int(total * request.gpu_memory_utilization) - torch.cuda.memory_reserved(device)
        return max(0, min(left, int(free * _MOST_OF_FREE)))
    return min(int(_available_host_bytes() * _CPU_SHARE), _CPU_LIMIT_BYTES)


def _available_host_bytes() -> int:
    return min([_meminfo_available(), *_cgroup_available()])


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return _CPU_LIMIT_BYTES


def _cgroup_available() -> list[int]:
    """What a container's own limit leaves, where there is one."""
    for limit, usage in _CGROUP_FILES:
        try:
            return [max(0, int(limit.read_text(encoding="ascii")) - int(usage.read_text(encoding="ascii")))]
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return []
