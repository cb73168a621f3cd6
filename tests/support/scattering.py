"""A KV cache whose free pages are no neighbours."""

from __future__ import annotations

from outrider.kv_cache import KVCacheManager


def take_every_other_page(manager: KVCacheManager) -> None:
    """Hold half of an empty cache's pages for good, so that no two free ones are neighbours."""
    size, count = manager.pool.page_size, manager.pool.num_pages
    odd, even = (manager.open(size * count) for _ in range(2))
    for number in range(count):
        manager.extend(odd if number % 2 else even, [0] * size)
    pages = [page for sequence in (odd, even) for page in manager.pages_of(sequence)]
    manager.release(even)
    taken = set(pages[: count // 2])
    if any(page + 1 in taken for page in taken):
        raise AssertionError("neighbours were taken")
