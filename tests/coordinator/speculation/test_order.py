"""Order of draft and target, on targets whose time per token is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outrider_coordinator.speculation.order import Order

Seconds = Callable[[int, bool], float]
"""Time of a session per token, by sessions and order."""


class Target:
    """A target with a clock, on which an order is chosen."""

    def __init__(self, seconds: Seconds) -> None:
        self.now, self.num_sessions = 0.0, 0
        self.seconds, self.changes = seconds, list[bool]()
        self.order = Order(self.changes.append, lambda: self.now)

    def load(self, num_sessions: int) -> None:
        while self.num_sessions < num_sessions:
            self.num_sessions += 1
            self.order.enter()
        while self.num_sessions > num_sessions:
            self.num_sessions -= 1
            self.order.leave()

    def step(self) -> None:
        """Three tokens of each session."""
        self.now += 3 * self.seconds(self.num_sessions, self.order.is_ahead)
        for _ in range(self.num_sessions):
            self.order.note(3)

    def serve(self, seconds: float) -> float:
        """Time per token over that of the better order."""
        until, began, num_tokens = self.now + seconds, self.now, 0
        while self.now < until:
            self.step()
            num_tokens += 3
        best = min(self.seconds(self.num_sessions, is_ahead) for is_ahead in (False, True))
        return (self.now - began) / num_tokens / best


def few(num_sessions: int, is_ahead: bool) -> float:
    """Ahead is better for few sessions, as on two H200."""
    return 0.003 * (1 + num_sessions / 64) * ((0.9 if num_sessions <= 16 else 1.1) if is_ahead else 1.0)


@pytest.mark.parametrize("num_sessions", [1, 8, 32, 64])
def test_the_better_order_is_found_and_kept(num_sessions: int) -> None:
    target = Target(few)
    target.load(num_sessions)
    target.serve(10.0)
    assert target.order.is_ahead == (num_sessions <= 16)
    assert target.serve(120.0) < 1.01


def test_what_a_change_itself_costs_is_not_taken_for_its_orders_time() -> None:
    """New channels and sessions that are out of step make the first tokens after a change late."""
    target = Target(few)
    target.load(num_sessions := 8)

    def change(is_ahead: bool) -> None:
        target.changes.append(is_ahead)
        target.now += 20 * few(num_sessions, is_ahead)

    target.order = Order(change, lambda: target.now)
    for _ in range(num_sessions):
        target.order.enter()
    target.serve(10.0)
    assert target.order.is_ahead


def test_a_load_that_returns_has_its_order_after_a_window() -> None:
    target = Target(few)
    for num_sessions in (8, 64, 8, 64):
        target.load(num_sessions)
        target.serve(10.0)
    for num_sessions in (8, 64):
        target.load(num_sessions)
        target.serve(0.7)
        assert target.order.is_ahead == (num_sessions <= 16)


def test_a_number_of_sessions_that_goes_to_and_fro_changes_the_order_seldom() -> None:
    target = Target(few)
    for num_sessions in (16, 64):
        target.load(num_sessions)
        target.serve(10.0)
    before = len(target.changes)
    for _ in range(500):
        for num_sessions in (15, 65):
            target.load(num_sessions)
            target.serve(0.01)
    assert len(target.changes) < before + 60


@pytest.mark.parametrize("seed", range(3))
def test_loads_that_change_every_few_seconds_have_the_better_order(seed: int) -> None:
    """Times of two H200, where the chain is best for few sessions and clearly worst for many."""
    times_ms = {1: (2.49, 2.19), 8: (3.21, 2.95), 32: (3.88, 3.78), 64: (5.19, 5.76), 128: (9.0, 12.0)}
    chance = random.Random(seed)
    target = Target(lambda num, is_ahead: times_ms[num][is_ahead] * chance.gauss(1e-3, 2e-5))
    ratios = []
    for _ in range(100):
        target.load(chance.choice(list(times_ms)))
        ratios.append(target.serve(chance.uniform(0.5, 4.0)))
    assert sum(ratios) / len(ratios) < 1.02


def test_an_order_that_becomes_better_is_found() -> None:
    factor = 1.1
    target = Target(lambda _, is_ahead: 0.003 * (factor if is_ahead else 1.0))
    target.load(4)
    target.serve(30.0)
    assert not target.order.is_ahead
    factor = 0.85
    target.serve(70.0)
    assert target.order.is_ahead


def test_equal_orders_change_seldom() -> None:
    chance = random.Random(7)
    target = Target(lambda _, is_ahead: 0.003 * chance.uniform(0.95, 1.05))
    target.load(8)
    target.serve(300.0)
    assert len(target.changes) < 60


def test_an_idle_target_has_no_time() -> None:
    target = Target(few)
    target.load(8)
    target.serve(10.0)
    target.load(0)
    target.now += 1000.0
    target.load(8)
    assert target.order.is_ahead
    assert target.serve(60.0) < 1.02


def test_prompts_of_bursts_do_not_count() -> None:
    target = Target(few)
    for _ in range(40):
        target.load(0)
        target.load(8)
        target.now += 0.05  # prompts
        target.serve(1.1)
    assert target.order.is_ahead
    changes = len(target.changes)
    for _ in range(100):
        target.load(0)
        target.load(8)
        target.now += 0.05
        target.serve(1.1)
    assert target.order.is_ahead and len(target.changes) - changes < 8


def test_sessions_that_come_and_go_are_measured_too() -> None:
    target = Target(few)
    target.load(8)
    for _ in range(400):
        target.serve(0.05)
        target.load(7)
        target.load(8)
    assert target.order.is_ahead


@pytest.mark.parametrize("seed", range(5))
def test_loads_that_change_at_any_time_have_the_better_order_in_the_end(seed: int) -> None:
    chance, target = random.Random(seed), Target(few)
    for _ in range(400):
        target.load(chance.choice((0, 1, 2, 7, 8, 9, 60, 64, 100)))
        target.serve(chance.choice((0.01, 0.2, 1.5))) if target.num_sessions else None
    target.load(64)
    target.serve(20.0)
    assert target.serve(60.0) < 1.02
