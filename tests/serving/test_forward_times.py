"""Estimates of how long a forward may take."""

from __future__ import annotations

from outrider.serving.forward_times import ForwardTimes


def test_nothing_is_known_at_first() -> None:
    times = ForwardTimes()
    assert times.longest_s(1) == times.longest_s(4096) == 0.0
    assert not times.knows(1)


def test_a_larger_forward_may_take_proportionally_longer() -> None:
    times = ForwardTimes()
    times.note(1, 1.4)
    assert times.longest_s(1) == 1.4
    assert times.longest_s(1000) == 1400.0  # a slow model on a CPU is not ended for its first long prompt
    assert times.knows(1)
    assert not times.knows(1000)


def test_forwards_of_the_same_size_narrow_the_estimate() -> None:
    times = ForwardTimes()
    times.note(1, 1.4)
    times.note(1000, 140.0)
    assert times.longest_s(512) == times.longest_s(1) * 100 == 140.0
    assert 140.0 <= times.longest_s(1023) < 280.0


def test_a_forward_that_compiled_is_forgotten() -> None:
    times = ForwardTimes()
    times.note(16, 20.0)
    assert times.longest_s(16) == 20.0
    for _ in range(100):
        times.note(16, 0.01)
    assert times.longest_s(16) < 0.02
