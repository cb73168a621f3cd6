"""Token shares of the requests in a forward."""

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
    shares = share_tokens(jobs, 512, max_prefill=512)
    assert shares[1:] == [5] * 16
    assert shares[0] == 512 - 80


def test_beside_running_rows_prefills_get_less_than_alone() -> None:
    prefills = [FakeJob(4000), FakeJob(3000)]
    assert share_tokens([*prefills, FakeJob(5, 5)], 512, max_prefill=128) == [16, 112, 5]
    assert share_tokens(prefills, 512, max_prefill=128) == [64, 448]
    assert share_tokens(prefills, 512, max_prefill=128, is_mixed=True) == [16, 112]
    assert share_tokens([FakeJob(20, 1), FakeJob(5, 5)], 512, max_prefill=4) == [4, 5]


def test_the_shortest_prefill_goes_first_and_the_one_served_longest_ago_gets_an_eighth() -> None:
    assert share_tokens([FakeJob(4000), FakeJob(4000)], 512) == [512, 0]
    assert share_tokens([FakeJob(4000), FakeJob(100), FakeJob(3000)], 512) == [64, 100, 348]
    assert share_tokens([FakeJob(3000), FakeJob(4000), FakeJob(100)], 512) == [412, 0, 100]


def test_of_equal_prompts_one_ends_after_the_other() -> None:
    jobs = [FakeJob(128) for _ in range(8)]
    ended = []
    while jobs:
        shares = share_tokens(jobs, 256)
        served = [job for job, share in zip(jobs, shares, strict=True) if share]
        for job, share in zip(jobs, shares, strict=True):
            job.num_left -= share
        ended.append(sum(not job.num_left for job in served))
        jobs = [job for job in jobs if job not in served] + [job for job in served if job.num_left]
    assert ended == [2, 2, 2, 2]


def test_links_share_what_prefills_get_and_take_what_others_leave() -> None:
    jobs = [FakeJob(100), FakeJob(100), FakeJob(100), FakeJob(500)]
    assert share_tokens(jobs, 256) == [100, 100, 56, 0]
    assert share_tokens(jobs, 256, links=[1, 1, 1, 2]) == [100, 28, 0, 128]
    assert share_tokens(jobs, 256, links=[1, 2, 2, 2]) == [100, 100, 56, 0]
    assert share_tokens([FakeJob(40), FakeJob(500)], 256, links=[1, 2]) == [40, 216]
    assert share_tokens([FakeJob(900), FakeJob(900), FakeJob(900)], 300, links=[7, 8, 9]) == [100, 100, 100]


@pytest.mark.parametrize("room", [1, 20, 40, 64])
def test_a_part_too_small_for_all_links_goes_around(room: int) -> None:
    waiting = [(link, FakeJob(60)) for link in range(6)]
    firsts = set[int]()
    for _ in range(6):
        shares = share_tokens([job for _, job in waiting], room, links=[link for link, _ in waiting])
        served = [entry for entry, share in zip(waiting, shares, strict=True) if share]
        assert served and sum(shares) <= room
        firsts.update(link for link, _ in served)
        waiting = [entry for entry in waiting if entry not in served] + served
    assert firsts == set(range(6))


def test_a_piece_is_not_smaller_than_worth_it_unless_it_is_the_last() -> None:
    assert share_tokens([FakeJob(100), FakeJob(30)], 120) == [90, 30]
    assert share_tokens([FakeJob(100), FakeJob(110)], 110) == [100, 0]
    assert share_tokens([FakeJob(100), FakeJob(10)], 18) == [18, 0]


def test_rebuilds_come_one_after_the_other_before_new_prompts() -> None:
    jobs = [FakeJob(4000), FakeJob(300), FakeJob(400), FakeJob(100)]
    assert share_tokens(jobs, 512, rebuilds=[2, 1]) == [16, 48, 400, 48]
    assert share_tokens(jobs[1:3], 512, rebuilds=[1, 0]) == [112, 400]
    assert share_tokens(jobs, 1024, rebuilds=[2, 1]) == [224, 300, 400, 100]
    assert share_tokens([*jobs, FakeJob(5, 5)], 512, max_prefill=128, rebuilds=[1]) == [16, 112, 0, 0, 5]


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
