"""Memory that a device has for the KV cache. How many pages that makes is ``outrider.kv_cache.sizing``'s."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from outrider.errors import ConfigError, ModelError
from outrider.kv_cache.sizing import CacheSize, KVCacheRequest, count_cache
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.models import ModelConfig
from outrider.model_executor.models.weights import weight_bytes

_log = logging.getLogger(__name__)

_CPU_SHARE, _CPU_LIMIT_BYTES = 0.25, 4 << 30
_CUDA_SHARE, _MOST_OF_FREE = 0.85, 0.95
_GRAPH_SHARE, _MOST_GRAPH_BYTES = 1 / 24, 2 << 30
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def graph_bytes(limit: int | None, device: torch.device) -> int | None:
    """Memory that CUDA graphs may take: the limit, or a share of the device's; None where there is none to bound."""
    if device.type != "cuda":
        return None
    if limit is not None:
        return limit
    _, total = torch.cuda.mem_get_info(device)
    return min(int(total * _GRAPH_SHARE), _MOST_GRAPH_BYTES)


def choose_num_pages(request: KVCacheRequest, device: torch.device) -> int:
    """The number of pages of a model without recurrent layers."""
    return choose_cache_size(request, device).num_pages


def choose_cache_size(request: KVCacheRequest, device: torch.device, *, kept_bytes: int = 0) -> CacheSize:
    """Size of the cache; ``ConfigError`` when a budget does not even hold one sequence of ``max_model_len``. Of a
    device's memory ``kept_bytes`` are left free, for what is allocated later.
    """
    found = count_cache(request, partial(_default_bytes, request, device, kept_bytes))
    window_bytes = 0 if request.window is None or not found.num_window_pages else request.window.bytes_per_token
    num_bytes = found.num_pages * request.page_size * (request.bytes_per_token - window_bytes)
    _log.info(
        "KV cache: %d pages of %d tokens, %.1f MiB on %s", found.num_pages, request.page_size, num_bytes / 2**20, device
    )
    if window_bytes:
        num_bytes = found.num_window_pages * request.page_size * window_bytes
        _log.info("Layers with a window: %d pages, %.1f MiB", found.num_window_pages, num_bytes / 2**20)
    if found.num_state_slots:
        num_bytes = found.num_state_slots * request.slot_bytes
        _log.info("States of recurrent layers: %d slots, %.1f MiB", found.num_state_slots, num_bytes / 2**20)
    return found


@contextlib.contextmanager
def explaining_out_of_memory(device: torch.device) -> Iterator[None]:
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


def check_weights_fit(config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
    """Raise ``ModelError`` when a rank's weights take more memory than the device has in all."""
    needed = weight_bytes(config, dtype, is_widened=device.type == "cpu", shard=shard)
    check_bytes_fit(needed, config, dtype, device)


def check_bytes_fit(needed: int, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ModelError`` when weights of this many bytes are more than the device's memory."""
    total = _total_bytes(device)
    if needed > total:
        kept = dtype if config.quantization is None else f"{dtype} and {config.quantization}"
        raise ModelError(
            f"the weights that config.json asks for take {needed / 2**30:.1f} GiB as {kept}, and {device} has"
            f" {total / 2**30:.1f} GiB in all"
        )


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _default_bytes(request: KVCacheRequest, device: torch.device, kept_bytes: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free -= kept_bytes
        if request.gpu_memory_utilization is None:
            return max(0, int(free * _CUDA_SHARE))
        # What this process holds, not what is gone: the rest may be another service's, which counts its own.
        taken = torch.cuda.memory_reserved(device) + kept_bytes
        left = int(total * request.gpu_memory_utilization) - taken
        return max(0, min(left, int(free * _MOST_OF_FREE)))
    return min(int(available_host_bytes() * _CPU_SHARE), _CPU_LIMIT_BYTES)


def available_host_bytes() -> int:
    """Memory of the host that this process may still take: the least of what the kernel and its cgroups leave."""
    return min([_meminfo_available(), *_cgroup_available()])


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return _CPU_LIMIT_BYTES


def _cgroup_available() -> list[int]:
    """Memory that a container's own limit leaves, if there is one."""
    for limit, usage in _CGROUP_FILES:
        try:
            return [max(0, int(limit.read_text(encoding="ascii")) - int(usage.read_text(encoding="ascii")))]
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return []
