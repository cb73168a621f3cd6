"""Who gets how many tokens of a forward."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from outrider.serving.token_budget import share_tokens


@dataclass
class FakeJob:
    num_left: int
    num_last: int = 1


def test_running_rows_all_go_and_a_prefill_gets_what_is_left() -> None:
    jobs = [FakeJob(4000), *[FakeJob(5, 5) for _ in range(16)]]
    shares = share_tokens(jobs, 512, max_beside=512)
    assert shares[1:] == [5] * 16
    assert shares[0] == 512 - 80


def test_beside_running_rows_prefills_get_less_than_alone() -> None:
    prefills = [FakeJob(4000), FakeJob(3000)]
    assert share_tokens([*prefills, FakeJob(5, 5)], 512, max_beside=128) == [64, 64, 5]
    assert share_tokens(prefills, 512, max_beside=128) == [256, 256]
    assert share_tokens(prefills, 512, max_beside=128, is_beside=True) == [64, 64]
    assert share_tokens([FakeJob(20, 1), FakeJob(5, 5)], 512, max_beside=4) == [4, 5]


def test_prefills_share_equally_and_a_short_one_leaves_its_rest_to_the_others() -> None:
    assert share_tokens([FakeJob(4000), FakeJob(4000)], 512) == [256, 256]
    assert share_tokens([FakeJob(4000), FakeJob(100), FakeJob(3000)], 512) == [206, 100, 206]


def test_rebuilds_come_one_after_the_other_before_new_prompts() -> None:
    jobs = [FakeJob(4000), FakeJob(300), FakeJob(400), FakeJob(100)]
    assert share_tokens(jobs, 512, rebuilds=[2, 1]) == [32, 48, 400, 32]
    assert share_tokens(jobs[1:3], 512, rebuilds=[1, 0]) == [112, 400]
    assert share_tokens(jobs, 1024, rebuilds=[2, 1]) == [224, 300, 400, 100]
    assert share_tokens([*jobs, FakeJob(5, 5)], 512, max_beside=128, rebuilds=[1]) == [16, 112, 0, 0, 5]


def test_the_last_tokens_are_never_cut() -> None:
    assert share_tokens([FakeJob(20, 5)], 18) == [15]
    assert share_tokens([FakeJob(9, 9)], 4) == [9]


@pytest.mark.parametrize("budget", [1, 4, 5, 6])
def test_a_budget_below_a_proposal_does_not_starve_a_prefill(budget: int) -> None:
    assert share_tokens([FakeJob(6, 6), FakeJob(4000)], budget) == [6, 1]


def test_running_rows_cannot_starve_a_prefill() -> None:
    jobs = [FakeJob(5, 5) for _ in range(200)] + [FakeJob(4000)]
    shares = share_tokens(jobs, 512)
    assert shares[-1] >= 64
    assert sum(shares) <= 512


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_served_in_bounded_turns_and_the_budget_holds(seed: int) -> None:
    generator = random.Random(seed)
    jobs = []
    for _ in range(generator.randint(1, 60)):
        num_last = generator.randint(1, 9)
        jobs.append(FakeJob(num_last + generator.choice([0, 1, 300, 2000]), num_last))
    budget = generator.choice([16, 64, 512])
    waited = {id(job): 0 for job in jobs}
    while jobs:
        shares = share_tokens(jobs, budget)
        assert any(shares)
        assert sum(shares) <= max(budget, *(job.num_last + 8 for job in jobs))
        back = []
        for job, share in list(zip(jobs, shares, strict=True)):
            assert share <= job.num_left
            assert share == job.num_left or job.num_left - share >= job.num_last
            waited[id(job)] = 0 if share else waited[id(job)] + 1
            assert waited[id(job)] <= 60
            if share:
                jobs.remove(job)
                job.num_left -= share
                if job.num_left:
                    back.append(job)
        jobs += back
