"""Storing keys and values in their slots, and copying pages.

Contract: ``kv`` is the cache of one layer, ``[num_pages * page_size, 2, H_kv, D]``, with keys at index 0 and values at
1, so that the key and value of a token are adjacent. Slots are distinct and in range.
"""

from __future__ import annotations

from outrider.kernels.kv_store.reference import copy_pages, store_kv

__all__ = ["copy_pages", "store_kv"]
