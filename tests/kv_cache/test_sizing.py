"""Size of the cache of models of which some layers have a window."""

from __future__ import annotations

from outrider.kv_cache import AttentionReach
from outrider.kv_cache.sizing import CacheSize, KVCacheRequest, WindowRequest, count_cache

MEMORY = 45_000_000_000
WINDOWED, ALL = 425_984, 507_904
"""Bytes of a token in the layers of Gemma 3 27B with a window of 1,024, and in all."""
WINDOW = WindowRequest(AttentionReach(1024), WINDOWED, 4096)


def size(
    max_model_len: int, *, memory: int = MEMORY, num_pages: int | None = None, max_sequences: int = 256
) -> CacheSize:
    request = KVCacheRequest(16, max_model_len, ALL, num_pages, None, max_sequences=max_sequences, window=WINDOW)
    return count_cache(request, lambda: memory)


def test_window_pages_take_half_of_the_memory_and_the_other_layers_the_rest() -> None:
    found = size(32768)
    assert found.num_window_pages * 16 * WINDOWED <= MEMORY // 2
    taken = 16 * (found.num_window_pages * WINDOWED + found.num_pages * (ALL - WINDOWED))
    assert 0.999 < taken / MEMORY <= 1
    assert found.num_pages > 3 * (MEMORY // (16 * ALL))


def test_few_sequences_have_the_window_pages_that_they_need_and_no_more() -> None:
    found = size(32768, max_sequences=8)
    assert found.num_window_pages == (1024 + 64 + 4096) // 16 + 2 + 7 * ((1024 + 64 + 16) // 16 + 2)


def test_as_many_of_the_longest_sequences_fit_as_memory_allows() -> None:
    found, each = size(2048), (1024 + 64 + 16) // 16 + 2
    assert min(found.num_pages // 128, found.num_window_pages // each) == 69
    assert MEMORY // (16 * ALL) // 128 == 43  # if all layers had the same pages


def test_pages_are_those_of_all_layers_where_a_window_would_save_nothing() -> None:
    assert size(1100) == CacheSize(MEMORY // (16 * ALL))
    assert size(32768, num_pages=200) == CacheSize(200)  # fewer than the longest forward needs
    assert size(32768, num_pages=4000) == CacheSize(4000, 2000)
