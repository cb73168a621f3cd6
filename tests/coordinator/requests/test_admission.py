"""Admission: the requests that run and those that wait."""

from __future__ import annotations

import pytest

from outrider.errors import CapacityError
from outrider_coordinator.requests.admission import Admission


def admission(*, max_running: int = 2, max_queue: int = 2, entries: str = "") -> Admission[str]:
    books: Admission[str] = Admission(max_running=max_running, max_queue=max_queue)
    for entry in entries:
        books.submit(entry)
        books.next()
    return books


def test_so_many_run_and_so_many_wait_and_the_next_is_refused_with_a_hint() -> None:
    books = admission(entries="abcd")
    assert (tuple(books.running), tuple(books.waiting)) == (("a", "b"), ("c", "d"))
    with pytest.raises(CapacityError, match="2 requests run and 2 wait") as caught:
        books.submit("e")
    assert caught.value.retry_after_ms > 0
    assert len(books.waiting) == 2


def test_without_a_queue_a_free_place_is_still_taken() -> None:
    books = admission(max_queue=0)
    books.submit("a")
    assert books.next() == "a"
    books.submit("b")
    assert books.next() == "b"
    with pytest.raises(CapacityError):
        books.submit("c")


def test_a_higher_limit_lets_more_run_and_a_lower_one_ends_none() -> None:
    books = admission(entries="abcd")
    books.max_running = 3
    assert books.next() == "c"
    books.max_running = 1
    assert tuple(books.running) == ("a", "b", "c")
    books.leave("a")
    books.leave("b")
    assert books.next() is None
    books.leave("c")
    assert books.next() == "d"


def test_first_in_first_out() -> None:
    books = admission(entries="abcd")
    assert books.next() is None
    books.leave("b")
    assert books.next() == "c"
    assert books.next() is None
    books.leave("a")
    assert books.next() == "d"


def test_who_found_no_room_goes_back_to_the_head_and_blocks_the_others() -> None:
    books = admission(max_running=4, entries="ab")
    books.submit("c")
    books.put_back("b")
    assert tuple(books.waiting) == ("b", "c")
    assert books.next() is None
    books.unblock()
    assert (books.next(), books.next()) == ("b", None)  # nobody overtakes while b may find no room again
    assert books.found_capacity("b")
    assert books.next() == "c"


def test_who_finds_no_room_again_keeps_its_place() -> None:
    books = admission(max_running=3, max_queue=3, entries="a")
    for entry in "bcd":
        books.submit(entry)
    assert (books.next(), books.next()) == ("b", "c")
    books.put_back("b")
    books.put_back("c")
    assert tuple(books.waiting) == ("b", "c", "d")
    for _ in range(3):
        books.unblock()
        assert (books.next(), books.next()) == ("b", None)
        books.put_back("b")
        assert tuple(books.waiting) == ("b", "c", "d")


def test_trials_end_with_the_queue_or_with_who_was_tried() -> None:
    books = admission(max_running=4, entries="ab")
    books.submit("c")
    books.put_back("b")
    books.unblock()
    assert books.next() == "b"
    books.leave("b")
    assert books.next() == "c"
    assert not books.found_capacity("a")
    assert books.found_capacity("c")
    books.submit("d")
    books.submit("e")
    assert (books.next(), books.next()) == ("d", "e")  # the queue was empty: room is not short any more
    assert not books.found_capacity("d")


def test_the_end_of_a_running_one_unblocks() -> None:
    books = admission(max_running=4, entries="ab")
    books.put_back("b")
    books.leave("a")
    assert books.next() == "b"


def test_the_end_of_the_blocked_one_itself_unblocks_and_that_of_another_does_not() -> None:
    books = admission(max_running=4, entries="abc")
    books.put_back("b")
    books.submit("d")
    books.leave("d")
    assert books.next() is None
    books.submit("e")
    books.leave("b")
    assert books.next() == "e"


def test_a_lower_number_goes_first_and_equal_ones_by_arrival() -> None:
    books = admission(max_running=1, max_queue=4, entries="a")
    for entry, priority in [("b", 0), ("c", 5), ("d", -1), ("e", 0)]:
        books.submit(entry, priority=priority)
    assert tuple(books.waiting) == ("d", "b", "e", "c")
    assert books.next() is None  # no running one gives way
    with pytest.raises(CapacityError):
        books.submit("f", priority=-9)
    books.pause("b")
    books.leave("a")
    assert books.next() == "d"
    assert books.resume("b")
    books.leave("d")
    assert [books.next(), *books.waiting] == ["b", "e", "c"]


def test_an_urgent_one_is_tried_at_once_and_one_that_goes_behind_unblocks_nothing() -> None:
    books = admission(max_running=3, max_queue=4, entries="ab")
    books.put_back("b")
    books.submit("c", priority=1)
    assert books.next() is None
    books.submit("d", priority=-1)
    assert (books.next(), books.next()) == ("d", None)
    books.put_back("d")
    assert tuple(books.waiting) == ("d", "b", "c")
    books.leave("b")
    assert books.next() is None  # it is the head that finds no room
    books.leave("d")
    assert books.next() == "c"


def test_leaving_twice_does_nothing() -> None:
    books = admission(entries="a")
    books.leave("a")
    books.leave("a")
    assert len(books.running) == len(books.waiting) == 0
