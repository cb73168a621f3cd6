"""How many KV pages a model gets.

Owns the arithmetic between bytes, tokens and pages and the defaults by device. Refuses to know sequences and tensors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import ConfigError

_log = logging.getLogger(__name__)

_DEFAULT_SEQUENCES = 64
_CPU_SHARE, _CPU_LIMIT_BYTES = 0.25, 4 << 30
_CUDA_SHARE = 0.85
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
    """Otherwise as many pages as fit; with neither, a share of the free memory."""


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


def _pages_by_bytes(request: KvRequest, device: torch.device) -> int:
    page_bytes = request.page_size * request.bytes_per_token
    needed = -(-request.max_model_len // request.page_size)
    if request.kv_cache_bytes is not None:
        num_pages = request.kv_cache_bytes // page_bytes
    else:
        num_pages = min(_default_bytes(device) // page_bytes, needed * _DEFAULT_SEQUENCES)
    if num_pages < needed:
        raise ConfigError(
            "kv_cache_bytes",
            f"{num_pages * page_bytes} bytes hold {num_pages * request.page_size} tokens, fewer than max_model_len "
            f"{request.max_model_len}, which needs {needed * page_bytes} bytes: give more or lower max_model_len",
        )
    return int(num_pages)


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
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
