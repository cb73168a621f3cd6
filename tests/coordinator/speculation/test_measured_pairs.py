"""Draft lengths with the stage times of an H200 as measured under load: whole bursts, the first one of a server too."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest

from tests.coordinator.speculation.measured_pairs import MeasuredHead, MeasuredPair, MeasuredTargetOverTwoCards
from tests.coordinator.speculation.simulated_load import H200, Bursts, BurstsInTwoGroups, FixedLength, Load

ARRANGEMENTS: dict[str, tuple[type[Bursts], H200]] = {
    "one card": (Bursts, MeasuredPair()),
    "one card, head": (Bursts, MeasuredHead()),
    "two cards": (BurstsInTwoGroups, MeasuredPair()),
    "target over two cards": (Bursts, MeasuredTargetOverTwoCards()),
}
SEEDS = range(3)


def users_of(name: str, acceptance: float, seed: int, *, most: int = 8) -> Bursts:
    kind, pair = ARRANGEMENTS[name]
    return kind(Load(pair, lambda now, number: acceptance, seed=seed), max_length=most)


@cache
def fixed_seconds(name: str, num_users: int, acceptance: float, length: int) -> float:
    """Of a burst with one draft length."""
    found = []
    for seed in range(8 if num_users == 1 else 3):
        users = users_of(name, acceptance, 100 + seed, most=length)
        if length:
            users.controller = FixedLength(length)
        found.append(users.burst(num_users))
    return fmean(found)


@cache
def chosen_seconds(name: str, num_users: int, acceptance: float) -> tuple[float, float]:
    """Of the first burst of a server, and of one of the three after it; means over the seeds."""
    bursts = []
    for seed in [*SEEDS, *(range(3, 12) if num_users == 1 else ())]:
        users = users_of(name, acceptance, seed)
        bursts.append([users.burst(num_users) for _ in range(4)])
        assert users.controller.num_switches <= 3
    return fmean(found[0] for found in bursts), fmean(fmean(found[1:]) for found in bursts)


def best_seconds(name: str, num_users: int, acceptance: float) -> float:
    return min(fixed_seconds(name, num_users, acceptance, length) for length in (0, 2, 3, 4, 6, 8))


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("num_users", [1, 8, 32])
def test_bursts_reach_plain_decoding_and_the_best_length(name: str, num_users: int, acceptance: float) -> None:
    """The first one pays for what is learned: a head's text and the first drafts are some hundredths of its second."""
    cold, warm = chosen_seconds(name, num_users, acceptance)
    plain = fixed_seconds(name, num_users, acceptance, 0)
    best = best_seconds(name, num_users, acceptance)
    assert warm < plain / 0.96
    assert warm < best / 0.935
    assert cold < plain / 0.93
    assert cold < best / 0.91


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("acceptance", [0.5, 0.9])
def test_the_first_burst_of_many_users_is_as_fast_as_a_plain_one(name: str, acceptance: float) -> None:
    users = users_of(name, acceptance, 0)
    assert users.burst(128) < fixed_seconds(name, 128, acceptance, 0) / 0.955
