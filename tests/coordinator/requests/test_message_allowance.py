"""Rate of messages: the set one, and less while the thread is busy."""

from __future__ import annotations

import pytest

from outrider_coordinator.requests.message_allowance import LEAST_PER_S, MOST_AT_ONCE, MessageAllowance

MAX_PER_S = 10_000
FITTING = 0.25 / 60e-6
"""Messages a second with which the thread is busy for .8 of the time."""


class Thread:
    """Time, and the share of it that a thread computes."""

    def __init__(self) -> None:
        self.now, self.computed = 100.0, 3.0

    def run(self, allowance: MessageAllowance, seconds: float, share: float) -> int:
        """Messages that leave while as many leave as may."""
        num_messages = 0
        for _ in range(round(seconds * 200)):
            self.now += 1 / 200
            self.computed += share / 200
            allowance.refill()
            while allowance.is_open:
                allowance.take()
                num_messages += 1
        return num_messages

    def allowance(self, max_per_s: int) -> MessageAllowance:
        return MessageAllowance(max_per_s, lambda: self.now, lambda: self.computed)


def test_as_many_leave_as_the_setting_allows_while_the_thread_has_time() -> None:
    thread = Thread()
    num_messages = thread.run(thread.allowance(MAX_PER_S), 2.0, 0.7)
    assert num_messages == pytest.approx(2 * MAX_PER_S + MOST_AT_ONCE, abs=MAX_PER_S / 200 + 2)


def test_fewer_leave_while_the_thread_is_busy_and_never_less_than_a_floor() -> None:
    thread = Thread()
    allowance = thread.allowance(MAX_PER_S)
    thread.run(allowance, 0.5, 1.0)
    assert LEAST_PER_S < allowance.per_s < 0.5 * MAX_PER_S
    thread.run(allowance, 2.0, 1.0)
    assert thread.run(allowance, 1.0, 1.0) == pytest.approx(LEAST_PER_S, abs=2)


def test_the_rate_comes_back_once_the_thread_has_time_and_stays_between() -> None:
    thread = Thread()
    allowance = thread.allowance(MAX_PER_S)
    thread.run(allowance, 0.35, 1.0)
    thread.run(allowance, 0.25, 0.8)
    fallen = allowance.per_s
    assert fallen < MAX_PER_S
    thread.run(allowance, 1.0, 0.8)
    assert allowance.per_s == fallen
    thread.run(allowance, 1.5, 0.5)
    assert allowance.per_s == MAX_PER_S


def test_the_rate_settles_where_thread_and_messages_fit() -> None:
    """A message takes 60 us, and the rest of the load .55 of the time."""
    thread = Thread()
    allowance = thread.allowance(MAX_PER_S)
    rates = []
    for _ in range(60):
        thread.run(allowance, 0.1, min(0.55 + 60e-6 * allowance.per_s, 1.0))
        rates.append(allowance.per_s)
    assert all(0.8 * FITTING < rate < 1.2 * FITTING for rate in rates[10:])
    assert rates[10:] == [rates[10]] * 50, "it stays there"


def test_a_setting_below_the_floor_holds() -> None:
    thread = Thread()
    allowance = thread.allowance(100)
    thread.run(allowance, 3.0, 1.0)
    assert thread.run(allowance, 1.0, 1.0) == pytest.approx(100, abs=2)


def test_any_number_may_leave_without_a_bound() -> None:
    thread = Thread()
    allowance = thread.allowance(0)
    for _ in range(10 * MOST_AT_ONCE):
        allowance.take()
    thread.now += 1.0
    thread.computed += 1.0
    allowance.refill()
    assert allowance.is_open
