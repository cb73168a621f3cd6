"""Draft lengths by expected throughput, under simulated loads: beside plain decoding and the best fixed length."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from outrider_coordinator.speculation import ControlledSession, DraftLengthController, Mode, expectation
from outrider_coordinator.speculation.draft_length import Choice, best_choice
from outrider_coordinator.speculation.exploration.trials import ModeTrial
from outrider_coordinator.speculation.mode_choice import ModeChoice
from tests.coordinator.speculation.measured_pairs import MeasuredH100, MeasuredHead
from tests.coordinator.speculation.simulated_load import (
    H200,
    Bursts,
    BusyCoordinator,
    Controlled,
    DisturbedLoad,
    FewAreCheap,
    InTwoGroups,
    Load,
    SlowLinks,
    TargetOverTwoCards,
    TwoCores,
    WakingLoad,
    WithHead,
    chosen_and_plain,
    expected_rate,
    fixed_rate,
)

LENGTHS = range(1, 9)
ARRANGEMENTS = [(Controlled, H200()), (InTwoGroups, H200()), (Controlled, TargetOverTwoCards())]
"""One card; a card for each model; the target over two cards with the draft on one of them."""


def best_rate(pair: H200, num_users: int, acceptance: float) -> float:
    return max(expected_rate(pair, num_users, length, acceptance) for length in (0, *LENGTHS))


@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.9])
@pytest.mark.parametrize(("num_users", "seconds"), [(1, 16.0), (8, 8.0), (32, 8.0), (128, 8.0)])
def test_it_reaches_plain_decoding_and_the_best_length(num_users: int, seconds: float, acceptance: float) -> None:
    pair = H200()
    load = Controlled(Load(pair, lambda now, number: acceptance, seed=3)).run(num_users, seconds)
    rate = load.rate(since=2.0)
    assert rate > 0.97 * expected_rate(pair, num_users, 0, acceptance)
    assert rate > 0.95 * best_rate(pair, num_users, acceptance)
    assert load.num_changes(since=2.0) <= 2


@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("num_users", [1, 8, 32])
def test_it_reaches_both_with_the_target_over_two_cards(num_users: int, acceptance: float) -> None:
    """Means over seeds: plain decoding is faster there, so that the two are close for eight users and more."""
    pair = TargetOverTwoCards()
    loads = [Controlled(Load(pair, lambda now, number: acceptance, seed=seed)) for seed in range(3)]
    rate = fmean(load.run(num_users, 8.0).rate(since=2.0) for load in loads)
    assert rate > 0.98 * expected_rate(pair, num_users, 0, acceptance)
    assert rate > 0.95 * best_rate(pair, num_users, acceptance)


def test_bursts_of_eight_users_with_the_target_over_two_cards_gain_what_there_is_to_gain() -> None:
    """It is little: with the measured stages no fixed length makes such a burst 6% faster than plain decoding."""
    pair = TargetOverTwoCards()
    chosen, plain = (
        [Bursts(Load(pair, lambda now, number: 0.8, seed=seed), max_length=most) for seed in range(3)]
        for most in (8, 0)
    )
    seconds, plain_seconds = (sum(users.burst(8) for users in arm for _ in range(5)) for arm in (chosen, plain))
    assert plain_seconds / 1.06 < seconds < plain_seconds / 0.98


@pytest.mark.parametrize("num_users", [1, 8])
def test_what_the_first_rounds_said_of_a_draft_that_wakes_is_checked_soon(num_users: int) -> None:
    pair = H200()
    load = Controlled(WakingLoad(pair, lambda now, number: 0.81, seed=1)).run(num_users, 8.0)
    assert load.rate(since=4.0) > 0.93 * best_rate(pair, num_users, 0.81)
    assert load.num_changes(since=4.0) == 0


@pytest.mark.parametrize("seed", [0, 8, 9, 12])
def test_a_disturbance_does_not_end_speculation_for_the_loads_after_it(seed: int) -> None:
    """One user is served while processes start beside the services; eight users come when that is over."""
    load = DisturbedLoad(H200(), lambda now, number: 0.81, seed=seed)
    users = Bursts(load)
    for _ in range(12):
        users.burst(1)
    load.slow_until, users.num_tokens = load.now + 60.0, 64
    users.burst(1)
    load.slow_until, users.num_tokens = 0.0, 256
    users.burst(8)  # may begin plainly
    plain_seconds = users.num_tokens * 8 / expected_rate(load.pair, 8, 0, 0.81)
    assert sum(users.burst(8) for _ in range(3)) < 0.88 * 3 * plain_seconds


@pytest.mark.parametrize("acceptance", [0.8, 0.9])
def test_what_is_learned_of_many_does_not_end_speculation_for_one(acceptance: float) -> None:
    last = list[float]()
    for seed in range(1, 6):
        chosen, plain = chosen_and_plain(TwoCores(), acceptance, seed=seed)
        gains = [plain.burst(num_users) / chosen.burst(num_users) for num_users in (1, 1, 1, 32, 1, 1, 32, 1, 1, 1)]
        last.append(fmean(gains[-2:]))
        assert min(gains[3], gains[6]) > 0.9  # one of them checks what many sessions' drafts cost
    assert min(last) > 1.15


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("pair", "acceptance", "phases", "seconds", "least"),
    [
        (MeasuredHead(), 0.75, (1, 128, 1, 128), 4.0, 0.95),
        (TwoCores(), 0.6, (1, 128, 1, 128), 8.0, 0.93),
        (MeasuredH100(), 0.9, (8, 64), 4.0, 1.2),
    ],
)
def test_many_who_join_few_that_draft_do_so_where_it_is_expected_to_pay(
    pair: H200, acceptance: float, phases: tuple[int, ...], seconds: float, least: float, seed: int
) -> None:
    """Drafts of those who were there before are no reason to bring many the text that they lack."""
    controlled = Controlled(Load(pair, lambda now, number: acceptance, seed=seed))
    for num_users in phases:
        began = controlled.load.now
        rate = controlled.run(num_users, seconds).rate(since=began)
    assert rate >= least * expected_rate(pair, phases[-1], 0, acceptance)


@pytest.mark.parametrize("num_users", [1, 4])
def test_a_useless_draft_on_two_cores_costs_little_from_the_start(num_users: int) -> None:
    pair = TwoCores()
    load = Controlled(Load(pair, lambda now, number: 0.02)).run(num_users, 30.0)
    assert load.rate() > 0.95 * expected_rate(pair, num_users, 0, 0.02)
    assert load.num_changes(since=5.0) == 0


@pytest.mark.parametrize("num_users", [1, 8])
def test_an_acceptance_that_falls_and_comes_back(num_users: int) -> None:
    def acceptance(now: float, number: int) -> float:
        return 0.3 if 6.0 <= now < 12.0 else 0.9

    pair = H200()
    load = Controlled(Load(pair, acceptance, seed=1)).run(num_users, 24.0)
    assert load.rate(2.0, 6.0) > 0.93 * best_rate(pair, num_users, 0.9)
    assert load.rate(7.0, 12.0) > 0.95 * expected_rate(pair, num_users, 0, 0.3)
    assert load.rate(16.0, 24.0) > 0.93 * best_rate(pair, num_users, 0.9)
    assert load.num_changes() <= 4


@pytest.mark.parametrize("acceptance", [0.75, 0.9])
def test_users_that_come_and_go_within_a_minute(acceptance: float) -> None:
    pair = H200()
    controlled = Controlled(Load(pair, lambda now, number: acceptance, seed=2))
    for num_users in (1, 4, 16, 64, 128, 64, 16, 4, 1):
        began = controlled.load.now
        load = controlled.run(num_users, 6.0)
        assert load.rate(began) > 0.93 * expected_rate(pair, num_users, 0, acceptance), num_users
        # Sessions that never end lack thousands of tokens by then, which have to be worth bringing to their drafts.
        assert load.rate(began + 3.0) > 0.88 * best_rate(pair, num_users, acceptance), num_users
    assert controlled.load.num_changes() <= 10


@pytest.mark.parametrize(("kind", "pair"), ARRANGEMENTS)
@pytest.mark.parametrize("acceptance", [0.3, 0.75])
def test_one_user_and_many_within_a_minute_are_never_much_slower_than_plain(
    kind: type[Controlled], pair: H200, acceptance: float
) -> None:
    users = kind(Load(pair, lambda now, number: acceptance, seed=2))
    for num_users, seconds in ((1, 8.0), (128, 15.0), (1, 8.0)):
        began = users.load.now
        rate = users.run(num_users, seconds).rate(began)
        assert rate > 0.95 * expected_rate(pair, num_users, 0, acceptance), num_users
    assert users.controller.num_switches <= 4


@pytest.mark.parametrize(("kind", "pair"), ARRANGEMENTS)
@pytest.mark.parametrize("num_users", [1, 8, 32])
def test_an_acceptance_that_falls_costs_little(kind: type[Controlled], pair: H200, num_users: int) -> None:
    users = kind(Load(pair, lambda now, number: 0.9 if now < 5.0 else 0.3, seed=2))
    load = users.run(num_users, 15.0)
    assert load.rate(2.0, 5.0) > 0.95 * expected_rate(pair, num_users, 0, 0.9)
    assert load.rate(5.0) > 0.95 * expected_rate(pair, num_users, 0, 0.3)
    assert users.controller.num_switches <= 3


@pytest.mark.parametrize("num_users", [32, 64, 128])
def test_bursts_are_as_fast_as_plain_ones_where_speculation_is_slower(num_users: int) -> None:
    """Few sessions are left when a burst ends, and speculation pays for them. The next burst must not begin with it."""
    chosen, plain = chosen_and_plain(BusyCoordinator(), 0.82, seed=4)
    for burst in (chosen.burst, plain.burst):
        burst(8)
    seconds = [chosen.burst(num_users) for _ in range(6)]
    plain_seconds = [plain.burst(num_users) for _ in range(6)]
    assert seconds[0] < plain_seconds[0] / 0.85  # so many sessions were not seen before
    assert sum(seconds) < sum(plain_seconds) / 0.95
    assert sum(seconds[1:]) < sum(plain_seconds[1:]) / 0.96
    assert chosen.controller.num_switches <= 2 * 6 + 2


def test_many_users_at_once_are_served_plainly_though_speculation_paid_for_one() -> None:
    """From one user to 64 all is a guess, six doublings of it."""
    chosen, plain = chosen_and_plain(FewAreCheap(), 0.8, seed=4)
    for burst in (chosen.burst, plain.burst):
        for _ in range(4):
            burst(1)
    assert chosen.controller.mode is Mode.SPECULATIVE
    assert chosen.burst(64) < plain.burst(64) / 0.96


@pytest.mark.parametrize(("num_users", "least"), [(1, 1.45), (8, 1.15)])
def test_bursts_are_faster_than_plain_ones_where_speculation_pays(num_users: int, least: float) -> None:
    chosen, plain = chosen_and_plain(BusyCoordinator(), 0.82, seed=5)
    chosen.burst(64)
    chosen.burst(num_users)
    seconds, plain_seconds = (sum(arm.burst(num_users) for _ in range(4)) for arm in (chosen, plain))
    assert seconds < plain_seconds / least


@pytest.mark.parametrize(("acceptance", "least"), [(0.8, 1.05), (0.4, 0.95)])
def test_a_head_that_reads_states_is_used_where_it_pays_and_costs_little_elsewhere(
    acceptance: float, least: float
) -> None:
    """Decoding is plain at first sight of the useless one; what its drafts lack then is not brought at each burst."""
    chosen, plain = chosen_and_plain(WithHead(), acceptance, seed=1)
    for burst in (chosen.burst, plain.burst):
        burst(1)
    seconds, plain_seconds = (sum(arm.burst(32) for _ in range(8)) for arm in (chosen, plain))
    assert seconds < plain_seconds / least
    assert chosen.controller.num_switches <= 4


@pytest.mark.parametrize(("num_users", "acceptance"), [(28, 0.65), (56, 0.8)])
def test_bursts_whose_text_costs_a_head_more_than_it_gains_are_nearly_as_fast_as_plain_ones(
    num_users: int, acceptance: float
) -> None:
    """Speculation pays for the few sessions at a burst's end, and would for all once the head has their prompts."""
    chosen, plain = chosen_and_plain(WithHead(), acceptance, seed=1)
    for burst in (chosen.burst, plain.burst):
        burst(1)
    seconds, plain_seconds = (sum(arm.burst(num_users) for _ in range(8)) for arm in (chosen, plain))
    assert seconds < plain_seconds / 0.94


def test_requests_that_end_at_once_leave_a_choice() -> None:
    controlled = Controlled(Load(H200(), lambda now, number: 0.8))
    for _ in range(8):
        controlled.resize(2)
        controlled.round()
        controlled.resize(0)
    assert controlled.run(2, 1.0).num_tokens


def test_the_price_of_drafts_that_read_states_is_the_targets_too() -> None:
    """What they lack, the target computes anew; turning plain costs the same whatever the draft reads."""
    choice = ModeChoice(8)
    for tokens in (32, 64, 96, 192) * 8:
        choice.timer.times.note_target(32, tokens, 5e-3 + 25e-6 * tokens)
    prices: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    for reads_states in (False, True):
        controller, session = DraftLengthController(8), ControlledSession(8, reads_states=reads_states)
        controller.enter(session)
        session.draft_lag = 1000
        for mode, found in prices.items():
            found.append(choice._switch_price_s(mode, 5e-3, controller._load()))
    assert prices[Mode.PLAIN][0] == prices[Mode.PLAIN][1]
    assert prices[Mode.SPECULATIVE][1] - prices[Mode.SPECULATIVE][0] == pytest.approx(25e-3, rel=0.2)


@pytest.mark.parametrize("pair", [H200(), SlowLinks()])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_user_after_the_other_speculates_whatever_the_first_drafts_come_to(pair: H200, seed: int) -> None:
    """A few unlucky drafts of a session say little; at the next one's start nothing is forgotten."""
    users = Bursts(Load(pair, lambda now, number: 0.8, seed=seed))
    users.burst(1)
    num_users = 20
    seconds = sum(users.burst(1) for _ in range(num_users))
    fixed_seconds = 8e-3 + (users.num_tokens - 1) / max(expected_rate(pair, 1, length, 0.8) for length in LENGTHS)
    assert seconds < num_users * fixed_seconds / 0.95
    assert users.controller.num_switches <= 2


def test_a_draft_computes_a_prompt_at_once_where_decoding_speculates_and_no_other_prompt_waits() -> None:
    users = Bursts(Load(H200(), lambda now, number: 0.9))
    controller = users.controller
    session = ControlledSession(8)
    controller.enter(session)
    assert not controller.will_draft(128)  # nothing is known yet
    controller.leave(session)
    users.burst(1)
    controller.enter(session)
    assert controller.mode is Mode.SPECULATIVE
    assert controller.will_draft(128)
    assert not controller.will_draft(100_000)


def test_a_draft_computes_no_prompt_beside_two_that_wait_though_the_load_has_not_grown() -> None:
    """On a device that both models share, first tokens would come later by the draft's forward."""
    users = Controlled(Load(H200(), lambda now, number: 0.9))
    users.run(3, 1.0)
    users.resize(1)
    controller, prompts = users.controller, [ControlledSession(8) for _ in range(2)]
    controller.enter(prompts[0])
    assert controller.will_draft(128)
    controller.enter(prompts[1])
    assert not controller.will_draft(128)


def test_sessions_that_differ_get_lengths_that_differ() -> None:
    load = Load(H200(), lambda now, number: 0.95 if number % 2 else 0.4, seed=1)
    controlled = Controlled(load)
    controlled.run(4, 6.0)
    poor, good = ([session.length for session in controlled.sessions[start::2]] for start in (0, 1))
    assert max(poor) < min(good)
    assert load.rate(2.0) > 1.1 * expected_rate(H200(), 4, 0, 0.0)


@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("num_users", [1, 8, 32])
def test_it_reaches_both_with_cards_of_their_own(num_users: int, acceptance: float) -> None:
    """Means over seeds: where both modes are within a seventh, few judged tokens decide."""
    pair = H200()
    loads = [InTwoGroups(Load(pair, lambda now, number: acceptance, seed=seed)) for seed in range(3)]
    rate = fmean(load.run(num_users, 8.0).rate(since=2.0) for load in loads)
    if num_users == 1:  # stands in no groups
        best = best_rate(pair, 1, acceptance)
    else:
        best = max(fixed_rate(InTwoGroups, pair, num_users, length, acceptance) for length in (0, *LENGTHS))
    assert rate > 0.98 * expected_rate(pair, num_users, 0, acceptance)
    assert rate > 0.95 * best
    assert all(load.load.num_changes(since=2.0) <= 2 for load in loads)


@pytest.mark.parametrize(("kind", "pair"), ARRANGEMENTS)
@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.9])
def test_many_users_are_served_as_well_once_fewer_were(kind: type[Controlled], pair: H200, acceptance: float) -> None:
    """As a benchmark asks: few users first. What speculation gains with 128 is known from those, if it is much."""
    users = kind(Load(pair, lambda now, number: acceptance, seed=1))
    for num_users in (8, 32):
        users.run(num_users, 4.0)
    began = users.load.now
    rate = users.run(128, 8.0).rate(began + 2.0)
    rates = [fixed_rate(kind, pair, 128, length, acceptance) for length in (0, *LENGTHS)]
    assert rate > 0.98 * rates[0]
    if max(rates) > 1.2 * rates[0]:
        assert rate > 0.95 * max(rates)
    assert users.load.num_changes(began) <= 1


@pytest.mark.parametrize(("num_users", "acceptance"), [(8, 0.9), (64, 0.3), (64, 0.9)])
def test_cards_of_their_own(num_users: int, acceptance: float) -> None:
    """Two groups that are drafted for and scored in turn."""
    pair = H200()
    load = InTwoGroups(Load(pair, lambda now, number: acceptance, seed=1)).run(num_users, 8.0)
    assert load.rate(2.0) > 0.97 * expected_rate(pair, num_users, 0, acceptance)
    assert load.num_changes(2.0) <= 2


def test_probes_are_few_and_cheap() -> None:
    pair = H200()
    controlled = Controlled(Load(pair, lambda now, number: 0.2, seed=5))
    load = controlled.run(32, 12.0)
    assert controlled.controller.mode is Mode.PLAIN
    assert 0 < controlled.controller.num_probes < 30
    assert load.rate(2.0) > 0.98 * expected_rate(pair, 32, 0, 0.2)


def test_rounds_of_probes_are_not_taken_for_speculation_by_all() -> None:
    users = InTwoGroups(Load(H200(), lambda now, number: 0.9, seed=1))
    users.run(128, 1.5)
    assert users.controller.num_probes > 0
    timer = users.controller._choice.timer
    assert timer.times.num_speculative(128) == timer.times.num_speculative(64) == 0


def test_time_of_requests_that_never_draft_does_not_pay_for_probes() -> None:
    """Plain requests beside others, as of a benchmark's other arm, take most of the time."""
    counts = {}
    for plain_s in (0.0, 8.0):
        users = Controlled(Load(H200(), lambda now, number: 0.2, seed=5))
        for _ in range(4):
            users.run(8, 1.0)
            users.resize(0)
            users._max_length = 0
            users.run(8, plain_s)
            users.resize(0)
            users._max_length = 8
        counts[plain_s] = users.controller.num_probes
    assert 0 < counts[8.0] <= counts[0.0] + 1


def test_the_same_events_give_the_same_lengths() -> None:
    traces = []
    for _ in range(2):
        load = Controlled(Load(H200(), lambda now, number: 0.8, seed=9)).run(8, 2.0)
        traces.append(load.trace)
    assert traces[0] == traces[1]


def test_nothing_is_drafted_while_a_prompt_is_taken_in() -> None:
    controller = DraftLengthController(8)
    first, second = ControlledSession(8), ControlledSession(8)
    controller.enter(first)
    controller.begin(1.0)
    controller.note_verdict(first, 0, 0, draft_lag=0)
    controller.end()
    assert controller.length(first) > 0
    controller.enter(second)
    assert controller.length(first) == 0
    controller.leave(second)
    assert controller.length(first) > 0


def test_a_session_that_left_is_not_heard() -> None:
    controller = DraftLengthController(8)
    session = ControlledSession(8)
    controller.enter(session)
    controller.leave(session)
    controller.leave(session)
    controller.begin(1.0)
    controller.note_verdict(session, 4, 4, draft_lag=0)
    controller.end()
    assert (controller.num_sessions, controller.has_prompts) == (0, False)


def test_requests_that_want_no_draft_leave_nothing_to_choose() -> None:
    controlled = Controlled(Load(H200(), lambda now, number: 0.9), max_length=0)
    controlled.run(2, 1.0)
    assert [session.length for session in controlled.sessions] == [0, 0]


def test_what_is_expected_of_speculation_is_computed_once_while_nothing_is_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain decoding looks at all sessions now and then; with many of them that would take much of a round."""
    num_looks = 0

    def counted(*arguments: Any, **named: Any) -> Choice | None:
        nonlocal num_looks
        num_looks += 1
        return best_choice(*arguments, **named)

    monkeypatch.setattr(expectation, "best_choice", counted)
    controlled = Controlled(Load(H200(), lambda now, number: 0.2, seed=5, noise=0.002))
    controlled.run(24, 2.0)
    assert controlled.controller.mode is Mode.PLAIN
    before, probes = num_looks, controlled.controller.num_probes
    num_rounds = 0
    while controlled.controller.num_probes == probes:
        controlled.round()
        num_rounds += 1
    assert num_looks <= before + 2 < before + num_rounds // 16
    before = num_looks
    for _ in range(64):
        controlled.round()
    assert num_looks > before  # a probe has said something of drafts


@pytest.mark.parametrize("num_sessions", [32, 48, 63, 64])
def test_sessions_are_few_or_many_by_one_rule(num_sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than 64 are few: speculation is tried at once, and what its first rounds said against it is checked."""
    is_few = num_sessions < 64
    controlled = Controlled(Load(H200(), lambda now, number: 0.95, seed=1))
    controlled.resize(num_sessions)
    for _ in range(3):
        controlled.round()
    assert (controlled.controller.mode is Mode.SPECULATIVE) is is_few

    checks = []
    monkeypatch.setattr(ModeTrial, "begin_if_due", lambda self, *_, is_check, **__: checks.append(is_check))
    choice = ModeChoice(8)
    trial = choice._trials[Mode.SPECULATIVE]
    seconds = {"plain_seconds": 5e-3, "speculative_seconds": 1e-2, "switch_s": 1e-2}
    choice._begin_trial_if_due(controlled.controller._load(), trial, rates=choice.rates, **seconds)
    assert checks == [is_few]


def test_rounds_beside_which_drafts_take_in_text_are_not_timed_unless_there_are_no_others() -> None:
    """Text has a price of its own. A trial that was timed beside it said that speculation took twice as long."""
    controlled = Controlled(Load(H200(), lambda now, number: 0.9, seed=3))
    controlled.run(4, 1.0)
    controller, times = controlled.controller, controlled.controller._choice.timer.times
    assert controller.mode is Mode.SPECULATIVE
    timed = []
    for _ in range(18):
        controller.note_draft_text(512, 4e-3)
        before = times.num_speculative(4)
        controlled.round()
        timed.append(times.num_speculative(4) - before)
    assert timed == [0] * 16 + [1] * 2
