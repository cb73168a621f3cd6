"""Prefix cache: full pages, found by the hash of their tokens and of all tokens before them.

The key of a page is a keyed 128-bit BLAKE2b hash of the key of the page before it and of its tokens. The chain begins
with a hash of the request's ``cache_salt``, so requests with different salts share nothing. The hash key is random for
each cache, so page keys cannot be predicted.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from outrider.errors import IntegrityError
from outrider.kv_cache.page_pool import PagePool
from outrider.types import ID_BYTES, pack_token_ids

KEY_BYTES = 16


class PrefixCache:
    """The cached pages of one pool, by key."""

    def __init__(self, pool: PagePool, *, hash_key: bytes | None = None) -> None:
        self.clear_counts()
        self._hash_key = secrets.token_bytes(32) if hash_key is None else hash_key
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.on_evict = self.note_evicted

    def __len__(self) -> int:
        return len(self._pages)

    def clear_counts(self) -> None:
        """Reset the statistics, after a warm-up."""
        self.num_queried_tokens = 0
        """Tokens that were looked for."""
        self.num_hit_tokens = 0
        """Tokens of those that were found."""
        self.num_evicted_pages = 0
        """Findable pages that were taken for other content."""

    def root_key(self, cache_salt: str) -> bytes:
        """The key before the first page."""
        return self._hash(b"salt", cache_salt.encode())

    def page_keys(
        self, parent: bytes, token_ids: Sequence[int], *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """The keys of the full pages of ``token_ids`` from place ``start`` to ``stop``, which follow the page with the
        key ``parent``.
        """
        size = self._pool.page_size
        packed, num_bytes = pack_token_ids(token_ids, start, stop), size * ID_BYTES
        for place in range(0, len(packed) - num_bytes + 1, num_bytes):
            parent = self._hash(parent, packed[place : place + num_bytes])
            yield parent

    def find(self, keys: Iterable[bytes], *, num_tokens: int) -> list[int]:
        """Return the pages of the longest cached prefix of ``keys``; ``num_tokens`` is the length of the lookup, for
        statistics.
        """
        pages: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += len(pages) * self._pool.page_size
        return pages

    def page_of(self, key: bytes) -> int:
        """The page with this key, which there is."""
        return self._pages[key]

    def evict(self, key: bytes) -> None:
        """Drop a key: its page cannot be found any more."""
        page = self._pages.pop(key)
        del self._keys[page]
        self._pool.make_unfindable(page)

    def holds(self, key: bytes) -> bool:
        """True if a page has this key."""
        return key in self._pages

    def register(self, page: int, key: bytes) -> bool:
        """Register a full page in use; False, without a change, if another page has the same content."""
        if key in self._pages:
            return False
        if page in self._keys:
            raise IntegrityError(f"page {page} is registered with another key")
        self._pages[key] = page
        self._keys[page] = key
        self._pool.make_findable(page)
        return True

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless keys and pages are consistent."""
        if {page: key for key, page in self._pages.items()} != self._keys:
            raise IntegrityError("keys and pages of the prefix cache do not name each other")
        for page in self._keys:
            if self._pool.is_writable(page):
                raise IntegrityError(f"page {page} can be found and may be written to")
        if self._pool.num_evictable > len(self._keys):
            raise IntegrityError(f"{self._pool.num_evictable} pages are findable, and {len(self._keys)} have a key")

    def note_evicted(self, page: int) -> None:
        """A page is taken for other content."""
        del self._pages[self._keys.pop(page)]
        self.num_evicted_pages += 1

    def _hash(self, *parts: bytes) -> bytes:
        return blake2b(b"".join(parts), digest_size=KEY_BYTES, key=self._hash_key).digest()
