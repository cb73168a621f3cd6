"""Writing keys and values into their slots, and copying pages.

Contract: ``kv`` is one layer's cache ``[num_pages * page_size, 2, H_kv, D]``, keys at index 0 and values at 1, so that
a token's key and value lie together and are stored at once. Slots are distinct and in range.
"""

from __future__ import annotations

from outrider.kernels.kv_store.reference import copy_pages, store_kv

__all__ = ["copy_pages", "store_kv"]
