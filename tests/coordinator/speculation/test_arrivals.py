"""Goodput where users always have a request, and where several coordinators share a target."""

from __future__ import annotations

from statistics import fmean

import pytest

from outrider_coordinator.speculation import Mode
from tests.coordinator.speculation.measured_pairs import MeasuredH100, MeasuredPair
from tests.coordinator.speculation.served_arrivals import ServedArrivals
from tests.coordinator.speculation.simulated_crowd import Crowd, TakingTurns
from tests.coordinator.speculation.simulated_load import H200, Load, expected_rate

ACCEPTANCE = 0.81


@pytest.mark.parametrize(
    ("pair", "num_prompt_tokens", "num_output_tokens", "num_users", "least"),
    [
        (MeasuredPair(), 128, 256, 1, 1.35), (MeasuredPair(), 128, 256, 8, 1.12), (MeasuredPair(), 128, 256, 64, 0.95),
        (MeasuredPair(), 1000, 256, 16, 0.94), (MeasuredPair(), 2000, 128, 32, 0.92),
        (MeasuredH100(), 128, 256, 16, 1.25), (MeasuredH100(), 1000, 256, 8, 1.2),
        (MeasuredH100(), 128, 16, 1, 1.4), (MeasuredH100(), 128, 16, 32, 0.95), (MeasuredH100(), 128, 32, 8, 1.0),
        (MeasuredPair(), 128, 16, 8, 0.92), (MeasuredPair(), 128, 64, 4, 1.05),
    ],
)  # fmt: skip
def test_users_who_always_have_a_request(
    pair: H200, num_prompt_tokens: int, num_output_tokens: int, num_users: int, least: float
) -> None:
    rates = []
    for length in (None, 0):
        served = ServedArrivals(
            pair, ACCEPTANCE, seed=1, length=length, num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )  # fmt: skip
        rates.append(served.serve(num_users, 12.0))
    assert rates[0] / rates[1] > least


@pytest.mark.parametrize(("num_users", "least"), [(4, 1.25), (16, 0.95), (64, 0.95)])
@pytest.mark.parametrize("num_coordinators", [2, 4])
def test_coordinators_come_to_the_same_mode(num_coordinators: int, num_users: int, least: float) -> None:
    crowd = Crowd(Load(H200(), lambda now, number: 0.8, seed=3), num_coordinators)
    rate = crowd.run(num_users, 4.0).rate(1.0)
    assert len({controller.mode for controller in crowd.controllers}) == 1
    assert rate > least * expected_rate(H200(), num_users, 0, 0.8)


@pytest.mark.parametrize(
    ("num_coordinators", "num_users", "least"),
    [(2, 8, 0.93), (2, 16, 0.93), (4, 8, 0.84), (4, 16, 0.85), (4, 32, 0.88)],
)
def test_coordinators_that_would_take_turns_decode_plainly(num_coordinators: int, num_users: int, least: float) -> None:
    """Speculation of one coordinator's sessions holds up those of the others."""
    rates = []
    for seed in range(3):
        crowd = TakingTurns(Load(H200(), lambda now, number: 0.8, seed=seed), num_coordinators)
        rates.append(crowd.run(num_users, 12.0).rate())
        assert {controller.mode for controller in crowd.controllers} == {Mode.PLAIN}
    assert fmean(rates) > least * expected_rate(H200(), num_users, 0, 0.8)
