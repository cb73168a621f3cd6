"""The KV cache's books: pages, page tables, the prefix cache and the size of the pool. Plain Python, without torch.

The tensor that the pages divide belongs to ``outrider.model_executor.model_executor``.
"""

from outrider.kv_cache.manager import KVCacheManager, PageCopy
from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.prefix_cache import PrefixCache
from outrider.kv_cache.sequence import KVSequence, PageTable, page_table_of

__all__ = ["KVCacheManager", "KVSequence", "PageCopy", "PagePool", "PageTable", "PrefixCache", "page_table_of"]
