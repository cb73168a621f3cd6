"""Sizing of the KV cache: bytes, tokens and pages, and slots for the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.errors import ConfigError
from outrider.kv_cache.groups import AttentionReach
from outrider.kv_cache.window_pages import num_window_pages

DEFAULT_MAX_SEQUENCES = 256
"""Default of ``max_running_requests``."""
DEFAULT_FORWARD_TOKENS = 4096
"""Default of ``max_batched_tokens`` on GPUs."""
_LEAST_SNAPSHOTS, _SEQUENCES_A_SNAPSHOT = 4, 8
"""Slots for snapshots of states: one for this many sequences, and some at least."""


@dataclass(frozen=True, slots=True)
class KVCacheRequest:
    """Settings that determine the size of the pool."""

    page_size: int
    max_model_len: int
    bytes_per_token: int
    num_pages: int | None
    """Taken as it is."""
    kv_cache_bytes: int | None
    """Otherwise as many pages as fit."""
    gpu_memory_utilization: float | None = None
    """Otherwise what is left of this share of the GPU's memory; with none of them, a share of what is free."""
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    """Sequences that run at the same time: where only the device's memory bounds the pool, it has room for this many of
    ``max_model_len`` at most."""
    slot_bytes: int = 0
    """Size of one sequence's states in recurrent layers; 0: there are none."""
    num_state_slots: int | None = None
    """Taken as it is; None: as many as ``max_sequences`` and their snapshots need, within half of the memory."""
    window: WindowRequest | None = None
    """Window of models of which some layers have one."""


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """Cache needs of layers with a window, beside layers that see everything."""

    reach: AttentionReach
    bytes_per_token: int
    """Bytes a token of these layers, part of those of all layers."""
    forward_tokens: int
    """Tokens of the longest forward."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Numbers of pages, window pages (0: the pages are those of all layers) and slots for states."""

    num_pages: int
    num_window_pages: int = 0
    num_state_slots: int = 0


def count_cache(request: KVCacheRequest, available_bytes: Callable[[], int]) -> CacheSize:
    """Size of the cache; ``ConfigError`` as ``count_pages``."""
    if request.window is None:
        num_slots, num_pages = count_slots_and_pages(request, available_bytes)
        return CacheSize(num_pages, 0, num_slots)
    if request.num_pages is None:
        given = available_bytes() if request.kv_cache_bytes is None else request.kv_cache_bytes
        if (divided := _divide(request, request.window, given)) is not None:
            return divided
        return CacheSize(count_pages(request, lambda: given))
    num_pages, window = count_pages(request, available_bytes), request.window
    least, each = (num_window_pages(window.reach, count, request.page_size) for count in (window.forward_tokens, 1))
    count = max(least, min(least + each * (request.max_sequences - 1), num_pages // 2))
    return CacheSize(num_pages, count if count < num_pages else 0)


def _divide(request: KVCacheRequest, window: WindowRequest, given: int) -> CacheSize | None:
    """Pages and window pages: of these as many as ``max_sequences`` hold, within half of the memory or what sequences
    of ``max_model_len`` need. None where there is no room for one of those, or where it is no longer than a window.
    """
    size, needed = request.page_size, -(-request.max_model_len // request.page_size)
    page_bytes, window_bytes = size * (request.bytes_per_token - window.bytes_per_token), size * window.bytes_per_token
    least, each = (num_window_pages(window.reach, count, size) for count in (window.forward_tokens, 1))
    if each >= needed:
        return None
    of_longest = given // (needed * page_bytes + each * window_bytes) * each
    within = max(least, given // 2 // window_bytes, of_longest)
    count = min(least + each * (request.max_sequences - 1), within)
    num_pages = min((given - count * window_bytes) // page_bytes, needed * request.max_sequences)
    return CacheSize(num_pages, count) if num_pages >= max(needed, count + 1) else None


def count_slots_and_pages(request: KVCacheRequest, available_bytes: Callable[[], int]) -> tuple[int, int]:
    """Slots for states of recurrent layers, and pages in what they leave; ``ConfigError`` as ``count_pages``."""
    if not request.slot_bytes:
        return 0, count_pages(request, available_bytes)
    given = available_bytes() if request.kv_cache_bytes is None else request.kv_cache_bytes
    num_slots = request.num_state_slots
    if num_slots is None:
        wanted = request.max_sequences + max(_LEAST_SNAPSHOTS, request.max_sequences // _SEQUENCES_A_SNAPSHOT)
        num_slots = min(wanted, given // 2 // request.slot_bytes)
    if num_slots < 1:
        raise ConfigError(
            "kv_cache_bytes" if request.gpu_memory_utilization is None else "gpu_memory_utilization",
            f"half of {given} bytes hold no state of a sequence in the recurrent layers, which takes"
            f" {request.slot_bytes} bytes: give more",
        )
    if request.num_pages is not None:
        return num_slots, count_pages(request, available_bytes)
    left = given - num_slots * request.slot_bytes
    if request.kv_cache_bytes is not None:
        request = replace(request, kv_cache_bytes=left)
    return num_slots, count_pages(request, lambda: left)


def count_pages(request: KVCacheRequest, available_bytes: Callable[[], int]) -> int:
    """The number of pages; ``ConfigError`` if the budget is too small for one sequence of ``max_model_len``.

    ``available_bytes`` is called only if the request has no size.
    """
    if request.page_size < 1:
        raise ConfigError("page_size", f"must be at least 1, not {request.page_size}")
    num_pages = request.num_pages if request.num_pages is not None else _pages_by_bytes(request, available_bytes)
    if num_pages < 1:
        raise ConfigError("num_pages", f"must be at least 1, not {num_pages}")
    return num_pages


def _pages_by_bytes(request: KVCacheRequest, available_bytes: Callable[[], int]) -> int:
    page_bytes = request.page_size * request.bytes_per_token
    needed = -(-request.max_model_len // request.page_size)
    given = available_bytes() if request.kv_cache_bytes is None else request.kv_cache_bytes
    num_pages = given // page_bytes
    if request.kv_cache_bytes is None:
        num_pages = min(num_pages, needed * request.max_sequences)
    if num_pages < needed:
        raise ConfigError(
            "kv_cache_bytes" if request.gpu_memory_utilization is None else "gpu_memory_utilization",
            f"{given} bytes hold {num_pages * request.page_size} tokens, fewer than max_model_len "
            f"{request.max_model_len}, which needs {needed * page_bytes} bytes: give more or lower max_model_len",
        )
    return num_pages
