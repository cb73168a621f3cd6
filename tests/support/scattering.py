"""A KV cache whose free pages are no neighbours."""

from __future__ import annotations

from outrider.kv_cache import KVCacheManager


def take_every_other_page(manager: KVCacheManager) -> None:
    """Hold half of an empty cache's pages for good, so that no two free ones are neighbours."""
    singles = [manager.open(1) for _ in range(manager.pool.num_pages)]
    for single in singles:
        manager.extend(single, [0])
    for single in singles[::2]:
        manager.release(single)
