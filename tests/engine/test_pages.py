"""The page pool's books."""

from __future__ import annotations

import pytest

from outrider.engine.pages import PagePool
from outrider.errors import IntegrityError, OutOfPagesError


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
    with pytest.raises(OutOfPagesError):
        pool.share(held)
    assert pool.num_free == 1
    pool.check_integrity([held])


def test_a_run_of_neighbours_is_preferred_to_scattered_pages() -> None:
    pool = PagePool(10, 1)
    pages = pool.allocate(10)
    pool.release([0, 2, *pages[4:7], 8])
    assert pool.allocate(3) == [4, 5, 6]
    assert pool.allocate(3) == [0, 2, 8]


def test_a_shared_page_keeps_one_back_for_the_copy_and_exchanging_cannot_fail() -> None:
    pool = PagePool(4, 4)
    held = pool.allocate(2)
    pool.share(held)
    assert pool.num_free == 0
    with pytest.raises(OutOfPagesError):
        pool.allocate(1)
    own = pool.exchange_shared(held[0])
    assert own not in held
    assert not pool.is_shared(held[0])
    pool.check_integrity([held, [own, held[1]]])
    pool.release([own, held[1]])
    assert pool.num_free == 2
    pool.release(held)
    assert (pool.num_free, pool.num_used) == (4, 0)


def test_a_released_page_stays_while_another_holds_it() -> None:
    pool = PagePool(4, 4)
    held = pool.allocate(2)
    pool.share(held)
    pool.release(held)
    assert pool.num_free == 2
    pool.check_integrity([held])


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


def test_misuse_is_found_at_once() -> None:
    pool = PagePool(4, 4)
    held = pool.allocate(2)
    with pytest.raises(IntegrityError, match="page 3 is held by nobody"):
        pool.release([3])
    with pytest.raises(IntegrityError, match="named twice"):
        pool.release([held[0], held[0]])
    with pytest.raises(IntegrityError, match="only a shared page"):
        pool.exchange_shared(held[0])
    pool.check_integrity([held])
