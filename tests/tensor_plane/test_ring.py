"""The books of a ring: nothing unread is written over, whatever the order of reading and giving up."""

from __future__ import annotations

import random

import pytest

from outrider.errors import IntegrityError
from outrider.tensor_plane.ring import ALIGNMENT, Ring, Use


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_used_twice_at_a_time_and_the_room_is_all_given_back(seed: int) -> None:
    draw = random.Random(seed)
    ring = Ring(64 * ALIGNMENT)
    live: dict[int, Use] = {}
    num_refused = 0
    for now in range(500):
        sizes = [draw.randint(1, 3 * ALIGNMENT) for _ in range(draw.randint(1, 4))]
        placed = ring.place(sizes, float(now))
        ring.check_integrity()
        num_refused += placed is None
        for use in placed or []:
            assert all(use.end <= other.begin or other.end <= use.begin for other in live.values())
            assert use.sequence not in live
            live[use.sequence] = use
        assert [use.end - use.begin for use in placed or []] == (sizes if placed else [])
        done = draw.sample(sorted(live), k=draw.randint(0, min(4, len(live))))
        ring.finish([*done, 10**6])
        for sequence in done:
            del live[sequence]
        if draw.random() < 0.05 and live:
            floor = draw.choice(sorted(live))
            ring.raise_floor(floor)
            live = {sequence: use for sequence, use in live.items() if sequence >= floor}
        assert ring.num_unread == len(live)
        assert ring.floor == min(live, default=ring.floor)
    assert num_refused
    ring.finish(list(live))
    assert ring.place([ring.capacity], 0.0) is not None


def test_what_is_placed_together_lies_side_by_side() -> None:
    ring = Ring(4096)
    ring.place([100], 0.0)
    first, second, third = ring.place([10, 20, 30], 0.0) or []
    assert first.begin == ALIGNMENT
    assert (first.end, second.end) == (second.begin, third.begin)


def test_the_floor_gives_up_what_waited_too_long_and_only_that() -> None:
    ring = Ring(4096)
    (old,) = ring.place([10], 0.0) or []
    (young,) = ring.place([10], 5.0) or []
    assert ring.expired(6.0, 10.0) is None
    assert ring.expired(11.0, 10.0) == young.sequence
    ring.raise_floor(young.sequence)
    assert ring.num_unread == 1
    assert ring.floor == young.sequence > old.sequence


def test_broken_books_are_found() -> None:
    ring = Ring(4096)
    (use,) = ring.place([10], 0.0) or []
    object.__setattr__(use, "end", 5000)
    with pytest.raises(IntegrityError):
        ring.check_integrity()
