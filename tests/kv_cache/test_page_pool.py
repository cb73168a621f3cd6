"""Reference counts and the free queue of the page pool."""

from __future__ import annotations

import pytest

from outrider.errors import IntegrityError, OutOfPagesError
from outrider.kv_cache import PagePool


def test_pages_are_given_out_once_and_come_back() -> None:
    pool = PagePool(5, 4)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    with pytest.raises(OutOfPagesError, match="1 KV pages are needed and 0 of 5 are free"):
        pool.allocate(1)
    pool.release(first)
    assert sorted(pool.allocate(2)) == sorted(first)
    pool.check_integrity([first, second])


def test_a_refused_allocation_changes_nothing() -> None:
    pool = PagePool(3, 4)
    held = pool.allocate(2)
    with pytest.raises(OutOfPagesError):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([held])


def test_a_run_of_neighbours_is_preferred_to_scattered_pages() -> None:
    pool = PagePool(10, 1)
    pages = pool.allocate(10)
    pool.release([0, 2, *pages[4:7], 8])
    assert pool.allocate(3) == [4, 5, 6]
    assert pool.allocate(3) == [0, 2, 8]


def test_pages_after_a_given_page_are_preferred() -> None:
    pool = PagePool(10, 1)
    first, second = pool.allocate(1, room=4), pool.allocate(1, room=4)
    assert (first, second) == ([0], [4])
    assert pool.allocate(2, after=0) == [1, 2]
    assert pool.allocate(2, after=4) == [5, 6]


def test_a_shared_page_takes_nothing_and_is_free_when_its_last_holder_is_gone() -> None:
    pool = PagePool(4, 4)
    held = pool.allocate(2)
    for _ in range(20):
        pool.share(held)
    assert (pool.num_free, pool.references(held[0])) == (2, 21)
    for _ in range(20):
        assert pool.release(held) == []
    assert sorted(pool.release(held)) == sorted(held)
    pool.check_integrity([])


def test_findable_pages_are_taken_last_the_least_recently_used_first() -> None:
    pool = PagePool(4, 1)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pages = pool.allocate(4)
    for page in pages[:3]:
        pool.make_findable(page)
    pool.release([0, 1])  # the last of a run is evicted first
    pool.release([2])
    pool.release([3])
    assert (pool.num_free, pool.num_evictable) == (4, 3)
    assert pool.allocate(1) == [3]
    pool.share([1])  # used again, so no longer the least recently used
    pool.release([1])
    assert pool.allocate(3) == [0, 2, 1] == evicted
    pool.check_integrity([[0, 1, 2, 3]])


def test_a_findable_page_can_be_held_again_and_a_blank_one_cannot() -> None:
    pool = PagePool(2, 1)
    pages = pool.allocate(2)
    pool.make_findable(0)
    assert not pool.is_writable(0)
    assert pool.is_writable(1)
    pool.release(pages)
    pool.share([0])
    with pytest.raises(IntegrityError, match="page 1 is free and cannot be found"):
        pool.share([1])
    with pytest.raises(IntegrityError, match="page 1 has no holder"):
        pool.make_findable(1)
    pool.check_integrity([[0]])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "page 0 counts 1 holders and stands in 0 page tables"),
        ([[0, 1], [1]], "page 1 counts 1 holders and stands in 2"),
        ([[0, 1, 1]], "names a page twice"),
        ([[0, 1, 2]], "page 2 counts 0 holders and stands in 1"),
        ([[0, 1, 9]], "names page 9, and there are 4"),
    ],
)
def test_check_integrity_names_what_is_wrong(tables: list[list[int]], message: str) -> None:
    pool = PagePool(4, 4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity(tables)


def test_releasing_a_free_page_is_an_error() -> None:
    pool = PagePool(4, 4)
    held = pool.allocate(2)
    with pytest.raises(IntegrityError, match="page 3 has no holder"):
        pool.release([3])
    pool.check_integrity([held])
