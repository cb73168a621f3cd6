"""Draft lengths under bursts as services serve them: slow first rounds, noise, and requests that never draft."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from outrider_coordinator.speculation import Mode
from outrider_coordinator.speculation.mode_selector import ModeSelector
from tests.coordinator.speculation.measured_pairs import (
    MeasuredH100,
    MeasuredH100OfSlowerHost,
    MeasuredHead,
    MeasuredLongContexts,
    MeasuredLongContextsH100,
    MeasuredPair,
)
from tests.coordinator.speculation.served_bursts import Served
from tests.coordinator.speculation.simulated_load import H200


def benchmark(pair: H200, acceptance: float, num_users: int, *, seed: int, length: int | None = None) -> list[float]:
    """Seconds of the bursts of one arm, after a load of one user; plain ones, and those of one token, come between."""
    served = Served(pair, acceptance, seed=seed, length=length)
    for _ in range(4):
        served.burst(1)
    seconds = []
    for _ in range(3):
        served.burst(num_users, num_tokens=1)
        seconds.append(served.burst(num_users))
        for _ in range(2):
            served.burst(num_users, num_tokens=1, drafts=False)
            served.burst(num_users, drafts=False)
    return seconds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_plain_requests_and_those_of_one_token_do_not_end_speculation(seed: int) -> None:
    """A recorded run on a GPU drafted once after such, and went on plainly for 115 of its steps."""
    served = Served(MeasuredPair(), 0.81, seed=seed)
    for _ in range(8):
        served.burst(1)
    served.burst(8)
    before = served.controller._request_s
    for _ in range(4):
        served.burst(8, num_tokens=1, drafts=False)
        served.burst(8, drafts=False)
        served.burst(8, num_tokens=1)
    assert served.controller._request_s == before
    served.burst(8)
    num_plain = sum(length == 0 for length, _ in served.rounds)
    assert num_plain < 12  # while drafts take in their text, and of a trial of plain decoding
    assert served.controller.num_switches == 0


@pytest.mark.parametrize(("pair", "acceptance", "length"), [(MeasuredPair(), 0.9, 4), (MeasuredHead(), 0.75, 4)])
def test_a_benchmark_of_many_users_drafts_though_its_other_arms_never_do(
    pair: H200, acceptance: float, length: int
) -> None:
    chosen, fixed = (
        fmean(fmean(benchmark(pair, acceptance, 32, seed=seed, length=arm)[1:]) for seed in range(3))
        for arm in (None, length)
    )
    assert chosen < fixed / 0.93


def test_the_time_until_first_tokens_is_no_loss_of_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded in either mode meanwhile, nor while nothing is served."""
    intervals_s: list[float] = []
    observe = ModeSelector.observe

    def noting(selector: ModeSelector, now: float, *arguments: Any, **named: Any) -> bool:
        intervals_s.append(now - (now if selector._observed_at is None else selector._observed_at))
        return observe(selector, now, *arguments, **named)

    served = Served(MeasuredPair(), 0.81, seed=1)
    for _ in range(4):
        served.burst(1)
    assert served.controller.mode is Mode.SPECULATIVE
    monkeypatch.setattr(ModeSelector, "observe", noting)
    served.burst(8, num_tokens=24, pause_s=10.0)
    longest_s = max(seconds for _, seconds in served.rounds)
    assert 0.0 < max(intervals_s) < 6 * longest_s


@pytest.mark.parametrize("seed", range(6))
def test_a_burst_of_many_is_not_tried_with_drafts_where_its_first_requests_end(seed: int) -> None:
    """With 63 of 64 left a check of speculation, as few sessions are allowed, brought all drafts their text for some
    twenty tokens more: a tenth of the burst.
    """

    def last_s(length: int | None) -> float:
        served = Served(MeasuredH100(), 0.81, seed=seed, length=length)
        for num_users in (1, 8, 32):
            for _ in range(3):
                served.burst(num_users)
        return served.burst(64)

    assert last_s(None) < last_s(0) / 0.95


LONG_CONTEXTS = [MeasuredLongContexts(), MeasuredLongContextsH100()]


def first_loads(
    pair: H200, acceptance: float, num_users: int, *, seed: int, length: int | None = None, first_tokens: int = 0
) -> list[float]:
    """Seconds of a process's first bursts, of many users at long contexts; requests of one token come between.

    ``first_tokens``: of one user's request before them.
    """
    served = Served(pair, acceptance, seed=seed, length=length)
    if first_tokens:
        served.burst(1, num_tokens=first_tokens)
    seconds = []
    for _ in range(5):
        served.burst(num_users, num_tokens=1)
        seconds.append(served.burst(num_users))
    return seconds


@pytest.mark.parametrize("pair", LONG_CONTEXTS, ids=lambda pair: type(pair).__name__)
@pytest.mark.parametrize(("num_users", "first_tokens"), [(64, 0), (64, 32), (128, 0)])
def test_many_users_at_long_contexts_are_the_first_load_and_come_to_draft(
    pair: H200, num_users: int, first_tokens: int
) -> None:
    """A probe tells that speculation will pay, and the time that it would have saved pays for its trial. That waits for
    the drafts' text: a recorded run on a GPU timed rounds beside it, and went on plainly at .6 of what was possible.
    """
    plain, fixed = (
        first_loads(pair, 0.81, num_users, seed=1, length=length, first_tokens=first_tokens) for length in (0, 3)
    )
    assert sum(fixed[3:]) < sum(plain[3:]) / 1.35
    chosen = [first_loads(pair, 0.81, num_users, seed=seed, first_tokens=first_tokens) for seed in range(4, 10)]
    assert all(each[0] < plain[0] / 0.9 for each in chosen)  # the probe's rounds are a process's first with drafts
    assert all(ours < theirs / 0.92 for each in chosen for ours, theirs in zip(each[1:], plain[1:], strict=True))
    assert all(sum(each[3:]) < sum(fixed[3:]) / 0.93 for each in chosen)


@pytest.mark.parametrize("num_users", [64, 128])
@pytest.mark.parametrize("acceptance", [0.02, 0.5])
def test_a_probe_of_a_poor_draft_leads_to_no_trial(num_users: int, acceptance: float) -> None:
    pair = MeasuredLongContexts()
    chosen, plain = (first_loads(pair, acceptance, num_users, seed=1, length=length) for length in (None, 0))
    assert max(ours / theirs for ours, theirs in zip(chosen[1:], plain[1:], strict=True)) < 1 / 0.95
    assert sum(chosen) < sum(plain) / 0.97


def bursts_of_many(
    pair: H200, acceptance: float, *, seed: int, length: int | None = None
) -> tuple[Served, list[float]]:
    """Seconds of three bursts of 64 users, whose first request comes some rounds before the others."""
    served = Served(pair, acceptance, seed=seed, length=length)
    for num_users in (1, 8, 32):
        for _ in range(3):
            served.burst(num_users, rounds_ahead=9)
            served.burst(num_users, drafts=False)
    seconds = []
    for _ in range(3):
        seconds.append(served.burst(64, rounds_ahead=9))
        served.burst(64, drafts=False)
    return served, seconds


@pytest.mark.parametrize("acceptance", [0.81, 0.9])
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_burst_of_many_on_a_slower_host_is_hardly_slower_than_plain(acceptance: float, seed: int) -> None:
    """Its first request had drafted already, so that the text of all others' drafts counted as paid for; or decoding
    turned to drafts with ten tokens of each session to come. Each took a tenth of the burst or more.
    """
    (_, chosen), (_, plain) = (
        bursts_of_many(MeasuredH100OfSlowerHost(), acceptance, seed=seed, length=length) for length in (None, 0)
    )
    assert max(ours / theirs for ours, theirs in zip(chosen, plain, strict=True)) < 1 / 0.92
    assert sum(chosen) < sum(plain) / 0.95
