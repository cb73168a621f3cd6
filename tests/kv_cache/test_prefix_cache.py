"""Keys of the prefix cache, and what is found by them."""

from __future__ import annotations

import pytest

from outrider.errors import IntegrityError
from outrider.kv_cache import PagePool, PrefixCache
from outrider.kv_cache.prefix_cache import KEY_BYTES


def keys_of(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[bytes]:
    return list(cache.page_keys(cache.root_key(salt), tokens))


def test_keys_cover_tokens_everything_before_them_and_the_salt() -> None:
    cache = PrefixCache(PagePool(8, 2))
    keys = keys_of(cache, [1, 2, 3, 4, 5])
    assert len(keys) == 2
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert keys_of(cache, [1, 2, 3, 4]) == keys
    assert keys_of(cache, [9, 2, 3, 4])[1] != keys[1]
    assert keys_of(cache, [1, 2, 4, 3])[0] == keys[0]
    assert set(keys_of(cache, [1, 2, 3, 4], "tenant")).isdisjoint(keys)
    assert list(cache.page_keys(keys[0], [3, 4])) == keys[1:]


def test_keys_cannot_be_computed_without_the_caches_own_key() -> None:
    first, second = PrefixCache(PagePool(8, 2)), PrefixCache(PagePool(8, 2))
    assert keys_of(first, [1, 2]) != keys_of(second, [1, 2])
    known = (PrefixCache(PagePool(8, 2), hash_key=b"k") for _ in range(2))
    assert len({keys_of(cache, [1, 2])[0] for cache in known}) == 1


def test_the_longest_leading_run_is_found_and_counted() -> None:
    pool = PagePool(8, 2)
    cache = PrefixCache(pool)
    keys = keys_of(cache, [1, 2, 3, 4, 5, 6])
    pages = pool.allocate(3)
    for page, key in ((pages[0], keys[0]), (pages[2], keys[2])):
        assert cache.register(page, key)
    assert cache.find(keys, num_tokens=7) == [pages[0]]
    cache.register(pages[1], keys[1])
    assert cache.find(keys, num_tokens=7) == pages
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (14, 8)
    cache.check_integrity()


def test_content_is_registered_once_and_an_evicted_page_is_forgotten() -> None:
    pool = PagePool(2, 2)
    cache = PrefixCache(pool)
    (key,) = keys_of(cache, [1, 2])
    first, second = pool.allocate(2)
    assert cache.register(first, key)
    assert not cache.register(second, key)
    with pytest.raises(IntegrityError, match="registered with another key"):
        cache.register(first, keys_of(cache, [3, 4])[0])
    pool.release([first, second])
    assert cache.find([key], num_tokens=3) == [first]
    pool.allocate(2)
    assert cache.find([key], num_tokens=3) == []
    assert (cache.num_evicted_pages, len(cache)) == (1, 0)
    cache.check_integrity()


def test_salts_cannot_be_made_to_look_like_tokens() -> None:
    cache = PrefixCache(PagePool(8, 1))
    roots = {cache.root_key(salt) for salt in ("", "a", "b", "salt", "\x01\x00\x00\x00")}
    assert len(roots | set(keys_of(cache, [1, 97]))) == 7
