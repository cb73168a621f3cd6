"""Ages of work that makes no progress."""

from __future__ import annotations

from outrider.stalls import LONGEST_LOOK_S, SUSPICIOUS_S, Stall, StallClock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def looks(clock: Clock, stalls: StallClock, mark: int | None, *, seconds: float, every_s: float = 0.5) -> float:
    """The age after looks for so long, in which the mark does not change."""
    age = 0.0
    for _ in range(round(seconds / every_s)):
        clock.now += every_s
        age = stalls.look(mark)
    return age


def test_an_age_is_counted_from_the_first_look_at_a_mark() -> None:
    clock = Clock()
    stalls = StallClock(clock)
    assert stalls.look(7) == 0.0
    assert looks(clock, stalls, 7, seconds=4.0) == 4.0


def test_another_mark_is_progress() -> None:
    clock = Clock()
    stalls = StallClock(clock)
    looks(clock, stalls, 7, seconds=4.0)
    assert stalls.look(8) == 0.0
    assert looks(clock, stalls, 8, seconds=1.0) == 1.0


def test_without_work_there_is_no_age() -> None:
    clock = Clock()
    stalls = StallClock(clock)
    looks(clock, stalls, 7, seconds=4.0)
    assert looks(clock, stalls, None, seconds=60.0) == 0.0
    assert stalls.look(7) == 0.0  # the same work, seen anew


def test_a_process_that_was_stopped_does_not_count_that_time() -> None:
    clock = Clock()
    stalls = StallClock(clock)
    looks(clock, stalls, 7, seconds=1.0)
    clock.now += 3600.0
    assert stalls.look(7) == 0.5 + LONGEST_LOOK_S


def test_looks_of_several_readers_count_the_time_once() -> None:
    clock = Clock()
    stalls = StallClock(clock)
    stalls.look(7)
    for _ in range(10):
        clock.now += 0.25
        assert stalls.look(7) == stalls.look(7)
    assert stalls.look(7) == 2.5


def test_what_a_stall_means() -> None:
    assert not Stall().is_hang
    assert not Stall(9.9, 10.0).is_hang
    assert Stall(10.0, 10.0).is_hang
    assert not Stall(1e9, 0.0).is_hang  # without a limit
    assert not Stall(SUSPICIOUS_S - 0.1, 10.0).is_suspicious
    assert Stall(SUSPICIOUS_S, 10.0).is_suspicious
