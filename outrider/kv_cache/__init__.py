"""KV cache management: page pool, page tables, groups of layers, prefix cache and sizing. No torch.

The tensors are in ``outrider.model_executor.kv_cache_tensors``.
"""

from outrider.kv_cache.groups import (
    AttentionReach,
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    RecurrentSpec,
    StateGroup,
)
from outrider.kv_cache.manager import KVCacheManager, PageCopy
from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.page_tables import JoinedPages
from outrider.kv_cache.prefix_cache import PrefixCache
from outrider.kv_cache.sequence import KVSequence, PageTable, page_table_of
from outrider.kv_cache.state_slots import StateRows, StateSlots
from outrider.kv_cache.window_pages import WindowPages

__all__ = [
    "AttentionReach",
    "JoinedPages",
    "KVCacheGroup",
    "KVCacheLayout",
    "KVCacheManager",
    "KVCacheSpec",
    "KVSequence",
    "PageCopy",
    "PagePool",
    "PageTable",
    "PrefixCache",
    "RecurrentSpec",
    "StateGroup",
    "StateRows",
    "StateSlots",
    "WindowPages",
    "page_table_of",
]
