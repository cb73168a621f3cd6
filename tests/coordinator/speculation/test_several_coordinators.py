"""Draft lengths where several coordinators share a target: each reckons with the sessions of the others."""

from __future__ import annotations

from statistics import fmean

import pytest

from outrider_coordinator.speculation import Mode
from outrider_coordinator.speculation.estimates.foreign_sessions import ForeignSessions, Forward
from tests.coordinator.speculation.simulated_crowd import Crowd, TakingTurns
from tests.coordinator.speculation.simulated_load import H200, Load, expected_rate

ACCEPTANCE = 0.8


def plain_rate(num_users: int) -> float:
    return expected_rate(H200(), num_users, 0, ACCEPTANCE)


def best_rate(num_users: int) -> float:
    return max(expected_rate(H200(), num_users, length, ACCEPTANCE) for length in range(9))


@pytest.mark.parametrize("kind", [Crowd, TakingTurns])
@pytest.mark.parametrize("num_coordinators", [2, 4])
def test_many_users_decode_plainly_though_each_coordinator_has_few_of_them(
    kind: type[Crowd], num_coordinators: int
) -> None:
    """16 users alone would draft; drafting is paid by all 64."""
    crowd = kind(Load(H200(), lambda now, number: ACCEPTANCE, seed=3), num_coordinators)
    load = crowd.run(64, 4.0)
    assert {controller.mode for controller in crowd.controllers} == {Mode.PLAIN}
    assert load.rate(1.0) > 0.97 * plain_rate(64)
    assert load.num_changes(1.0) == 0


@pytest.mark.parametrize("num_coordinators", [2, 4])
def test_users_that_come_and_go_are_served_in_one_mode_by_all(num_coordinators: int) -> None:
    """Means over seeds. With 16 users, sessions that lack thousands of tokens by then change late, and in a few seeds
    some coordinators do so before the others: in 2 of 16 with four coordinators, .956 of plain in the mean.
    """
    crowds = [Crowd(Load(H200(), lambda now, number: ACCEPTANCE, seed=seed), num_coordinators) for seed in range(1, 5)]
    for num_users in (8, 64, 16, 4):
        began = [crowd.load.now for crowd in crowds]
        loads = [crowd.run(num_users, 3.0) for crowd in crowds]
        rate = fmean(load.rate(since) for load, since in zip(loads, began, strict=True))
        assert rate > (0.9 if num_users == 16 else 0.95) * plain_rate(num_users), num_users
        num_split = sum(len({controller.mode for controller in crowd.controllers}) > 1 for crowd in crowds)
        assert num_split <= (num_users == 16), num_users
        if num_users < 16:
            late = fmean(load.rate(since + 1.5) for load, since in zip(loads, began, strict=True))
            assert late > 0.85 * best_rate(num_users), num_users
    assert max(crowd.load.num_changes() for crowd in crowds) <= 4


def test_rows_that_nobody_asked_for_are_no_foreign_sessions() -> None:
    """A session that ended may be in two more forwards."""
    foreign = ForeignSessions()
    for rows in (1, 1, 1, 64, 64, 1, 1):
        foreign.note(Forward(rows, 0, 1, 0), usual_length=4)
        assert foreign.num_sessions == 0
    assert foreign.load_ratio(1) == 1.0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_answers_that_come_in_several_messages_are_no_foreign_sessions(lag: int) -> None:
    """After a catch-up 8 of 64 sessions may go on apart from the others, in the same forwards."""
    foreign = ForeignSessions()
    for ended_ns in range(1, 6):
        foreign.note(Forward(64, 0, 64, 0, ended_ns), usual_length=4)
    for ended_ns in range(6, 30):
        foreign.note(Forward(64, 0, 8, 0, ended_ns), usual_length=4)
        if ended_ns - lag >= 6:
            foreign.note(Forward(64, 0, 56, 0, ended_ns - lag), usual_length=4)
        assert foreign.num_sessions == 0
    foreign = ForeignSessions()
    for ended_ns in range(1, 30):
        for own_rows in (8, 16):
            foreign.note(Forward(64, 80, own_rows, 2 * own_rows, ended_ns), usual_length=4)
    assert foreign.num_sessions == 40 and foreign.worth(drafting=False) == 1.0
    foreign = ForeignSessions()
    for ended_ns in range(1, 30):
        parts = [Forward(0, 0, 56, 0, ended_ns), Forward(64, 32, 8, 32, ended_ns)]
        for part in parts if ended_ns % 2 else reversed(parts):  # only one of them tells of the whole forward
            foreign.note(part, usual_length=4)
        assert foreign.num_sessions == 0


def test_the_rest_of_a_forward_with_prompts_is_no_forward_of_its_own() -> None:
    foreign = ForeignSessions()
    for ended_ns in range(1, 30):
        foreign.pass_over(ended_ns)
        foreign.note(Forward(64, 0, 4, 0, ended_ns), usual_length=4)
    foreign.note(Forward(4, 0, 4, 0, 30), usual_length=4)
    assert foreign.num_sessions == 0


def test_a_mode_is_worth_less_while_foreign_sessions_are_in_the_other() -> None:
    foreign = ForeignSessions()
    assert [foreign.worth(drafting=drafting) for drafting in (False, True)] == [1.0, 1.0]
    for _ in range(10):
        foreign.note(Forward(16, 0, 4, 0), usual_length=4)
    assert foreign.num_sessions == 12
    assert foreign.worth(drafting=False) == 1.0 > foreign.worth(drafting=True)
    for _ in range(30):
        foreign.note(Forward(16, 64, 4, 16), usual_length=4)
    assert foreign.worth(drafting=True) == 1.0 > foreign.worth(drafting=False)
    for _ in range(30):  # a third of them does not draft any more: then none should
        foreign.note(Forward(16, 48, 4, 16), usual_length=4)
    assert foreign.worth(drafting=False) == 1.0 > foreign.worth(drafting=True)
