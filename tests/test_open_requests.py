"""Bytes of open requests: what is refused, and what is given back."""

from __future__ import annotations

import contextlib

import pytest

from outrider.errors import CapacityError
from outrider.open_requests import OpenRequests


def test_large_requests_leave_room_to_small_ones() -> None:
    requests = OpenRequests(100)
    with requests.entered() as first, requests.entered() as second, requests.entered() as third:
        first.take(80)  # alone
        with pytest.raises(CapacityError, match="80 bytes are being read here, and 11 more"):
            second.take(11)
        second.take(10)
        third.take(5)
        with pytest.raises(CapacityError) as refused:
            third.take(1)  # what it has counts too
        assert refused.value.retry_after_ms > 0
        assert requests.num_bytes == 95
    assert requests.num_bytes == 0


def test_what_is_not_held_any_more_is_free() -> None:
    requests = OpenRequests(100)
    with requests.entered() as first, requests.entered() as second:
        first.take(90)
        first.keep(200)
        assert requests.num_bytes == 90
        first.keep(20)
        second.take(40)
        assert requests.num_bytes == 60
        first.release()
        assert requests.num_bytes == 40


def test_one_request_may_be_of_any_size() -> None:
    requests = OpenRequests(10)
    with pytest.raises(RuntimeError), requests.entered() as only:
        only.take(1000)
        only.take(1000)
        raise RuntimeError
    assert requests.num_bytes == 0


def test_small_requests_are_taken_however_much_others_hold() -> None:
    all_bytes = OpenRequests(1 << 20)
    with contextlib.ExitStack() as held:
        for _ in range(64):
            one, size = held.enter_context(all_bytes.entered()), 1 << 20
            while size:
                try:
                    one.take(size)
                    break
                except CapacityError:
                    size //= 2
        with all_bytes.entered() as small:
            small.take(256)
            with pytest.raises(CapacityError):
                small.take(256)
