"""What draft lengths are chosen by: fitted times, counted acceptance, and the choice itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outrider_coordinator.speculation.catch_up import CatchUp
from outrider_coordinator.speculation.draft_length import best_choice, choice_of, relative_error, usefulness
from outrider_coordinator.speculation.estimates.acceptance_estimate import PRIOR, AcceptanceEstimate, SessionAcceptance
from outrider_coordinator.speculation.estimates.linear_fit import LinearFit
from outrider_coordinator.speculation.estimates.round_timer import RoundTimer, VerdictBatch
from outrider_coordinator.speculation.estimates.session_spread import SessionSpread
from outrider_coordinator.speculation.estimates.step_times import RoundPrice, StepTimes
from outrider_coordinator.speculation.exploration.acceptance_probe import AcceptanceProbe
from outrider_coordinator.speculation.exploration.budget import ExplorationBudget
from outrider_coordinator.speculation.length_planner import START_LENGTHS, LengthPlanner
from outrider_coordinator.speculation.mode_selector import Mode, SwitchPrice
from outrider_coordinator.speculation.session_state import ControlledSession


def fit() -> LinearFit:
    return LinearFit((0.7, 0.002, 0.005), (0.5, 0.01, 0.02))


def test_a_fit_finds_what_made_the_values() -> None:
    found, random = fit(), np.random.default_rng(0)
    for _ in range(400):
        rows, tokens = int(random.integers(1, 64)), int(random.integers(1, 300))
        found.note((1.0, rows, tokens), (4e-3 + 2e-5 * rows + 1e-5 * tokens) * random.normal(1.0, 0.02))
    assert found.predict((1.0, 32, 160)) == pytest.approx(4e-3 + 2e-5 * 32 + 1e-5 * 160, rel=0.03)
    assert found.predict((1.0, 8, 8)) == pytest.approx(4e-3 + 2e-5 * 8 + 1e-5 * 8, rel=0.03)


def test_a_fit_of_one_point_says_that_point_there_and_more_beyond() -> None:
    found = fit()
    for _ in range(20):
        found.note((1.0, 8, 40), 5e-3)
    assert found.predict((1.0, 8, 40)) == pytest.approx(5e-3, rel=0.02)
    assert found.predict((1.0, 8, 72)) > found.predict((1.0, 8, 40)) > found.predict((1.0, 8, 8)) > 0.0


def test_a_fit_has_no_negative_slopes() -> None:
    found = fit()
    for rows in range(1, 40):
        found.note((1.0, rows, rows), 10.0 - 0.1 * rows)
    assert min(found.coefficients[1:]) >= 0.0


def test_drafting_takes_no_less_than_no_time() -> None:
    """Few tokens took 5 ms in a process's first rounds and many 40: where there are fewer, a line is below 0."""
    times = StepTimes()
    for _ in range(6):
        times.note_plain(64, 5e-3)
        times.note_target(64, 128, 6e-3)
        for tokens, milliseconds in ((32, 5.0), (64, 40.0)):
            times.note_draft(4, tokens, milliseconds / 1e3)
    price = times.speculative(64, 4)
    assert price.drafting + 4 * price.per_drafted_token < 0.0
    assert price.at(4) >= 5e-3
    assert price.at(64) > 35e-3


def test_a_fit_leaves_out_an_outlier_and_follows_a_change() -> None:
    found = fit()
    for _ in range(50):
        found.note((1.0, 1, 1), 5e-3)
    found.note((1.0, 1, 1), 1.0)
    assert found.predict((1.0, 1, 1)) == pytest.approx(5e-3, rel=0.02)
    for _ in range(500):
        found.note((1.0, 1, 1), 50e-3)
    assert found.predict((1.0, 1, 1)) == pytest.approx(50e-3, rel=0.05)


def test_what_has_faded_decides_only_what_is_not_observed_anew() -> None:
    """Rows and tokens that grow together are told apart by what was observed before of a slower device."""
    fit = LinearFit((0.5, 0.25, 0.01), (0.5, 0.25, 0.02))
    for rows, tokens in itertools.product((1, 4, 16), (16, 64)):
        fit.note((1.0, rows, tokens), 4.0 + 2.0 * rows)
    fit.fade()
    for rows in (8, 12) * 20:
        fit.note((1.0, rows, 4 * rows), 1.0 + 0.5 * rows)
    assert fit.predict((1.0, 10, 40)) == pytest.approx(6.0, rel=0.05)
    assert fit.predict((1.0, 10, 60)) == pytest.approx(6.0, rel=0.1)


def test_rounds_that_are_timed_anew_are_those_of_about_as_many_rows() -> None:
    times = StepTimes()
    for rows, seconds in ((1, 0.02), (32, 0.3)):
        for _ in range(8):
            times.note_target(rows, 5 * rows, seconds / 2)
            times.note_draft(4, 4 * rows, seconds / 2)
            times.note_speculative(rows, 4, 4 * rows, seconds)
    before = times.speculative(1, 4).at(4)
    times.forget_speculation(40)
    assert (times.num_speculative(1), times.num_speculative(32)) == (8, 0)
    assert times.speculative(1, 4).at(4) == pytest.approx(before, rel=0.1)


def test_nothing_seen_is_the_prior_acceptance() -> None:
    estimate = AcceptanceEstimate(8)
    estimate.fold()
    assert estimate.mean == PRIOR
    assert SessionAcceptance().relative(PRIOR) == 1.0


def judged_sessions(acceptances: list[float], num_rounds: int, *, seed: int) -> tuple[list[float], SessionSpread]:
    """What is believed of each after so many rounds of five draft tokens, and the spread once they have ended."""
    estimate, spread, random = AcceptanceEstimate(8), SessionSpread(), np.random.default_rng(seed)
    sessions = [SessionAcceptance() for _ in acceptances]
    for _ in range(num_rounds):
        mean = estimate.mean
        for session, acceptance in zip(sessions, acceptances, strict=True):
            is_accepted = random.random(5) < acceptance
            num_accepted = 5 if is_accepted.all() else int(is_accepted.argmin())
            session.note(5, num_accepted, mean)
            estimate.note(5, num_accepted, mean * session.relative(mean))
        estimate.fold()
    mean_tokens = spread.mean_tokens(sessions, estimate.mean)
    believed = [estimate.mean * session.relative(estimate.mean, mean_tokens) for session in sessions]
    for session in sessions:
        spread.note_ended(session)
    return believed, spread


def test_sessions_that_are_equal_are_believed_to_be_though_their_tokens_scatter() -> None:
    found = [judged_sessions([0.81] * 8, 20, seed=seed)[0] for seed in range(20)]
    assert np.mean([np.std(believed) for believed in found]) < 0.018  # 0.028 where the mean counts for 32 tokens


def test_sessions_that_differ_are_told_apart_within_some_rounds() -> None:
    found = [judged_sessions([0.9, 0.5] * 4, 5, seed=seed)[0] for seed in range(20)]
    differences = [np.mean(believed[::2]) - np.mean(believed[1::2]) for believed in found]
    assert np.mean(differences) > 0.25  # 0.13 where the mean counts for 32 tokens


def test_sessions_that_have_ended_say_how_much_new_ones_differ() -> None:
    equal, different = (judged_sessions(each, 40, seed=1)[1] for each in ([0.7] * 8, [0.9, 0.5] * 4))
    assert SessionSpread().mean_tokens([], 0.7) == 32.0  # nothing is known
    assert equal.mean_tokens([], 0.7) > 100.0
    assert different.mean_tokens([], 0.7) < 10.0


def test_a_mean_that_lags_behind_all_sessions_makes_no_difference_between_them() -> None:
    sessions = [SessionAcceptance() for _ in range(8)]
    for session in sessions:
        for number in range(40):
            session.note(1, int(number % 10 < 9), 0.5)
    assert SessionSpread().mean_tokens(sessions, 0.9) > 100.0


def test_rounds_of_one_length_are_timed_by_enough_of_them_to_tell_neighbours_apart() -> None:
    """Two draft lengths near the best one differ by 1% of their rates."""
    random, found = np.random.default_rng(3), []
    for _ in range(200):
        times = StepTimes()
        for _ in range(40):
            times.note_plain(8, 4e-3 * (1.0 + 0.07 * float(random.standard_normal())))
        found.append(times._seen_of(8, 0).seconds / 4e-3)
    assert np.std(found) < 0.021


def test_an_exploration_that_is_not_paid_for_holds_up_those_of_the_next_load() -> None:
    budget = ExplorationBudget(shortest_pause_s=0.25, longest_pause_s=20.0)
    assert not budget.is_due(0.0)
    assert budget.is_due(0.25)
    budget.spend(0.3, 0.02)
    budget.reset()  # decoding was speculative meanwhile, and is plain again
    assert not budget.is_due(0.6)
    assert not budget.is_due(2.2)
    assert budget.is_due(2.31)
    budget.reset()
    assert not budget.is_due(9.0)
    assert budget.is_due(9.25)


@pytest.mark.parametrize(("num_accepted", "is_followed"), [(6, False), (8, True)])
def test_a_probe_is_followed_by_another_one_if_more_was_accepted_than_by_chance(
    num_accepted: int, is_followed: bool
) -> None:
    """With 0.6 expected, 6 of seven judged tokens are within one and a half standard errors, 8 of eight are not."""
    probe, sessions = AcceptanceProbe(), [ControlledSession(8) for _ in range(4)]
    probe.begin_if_due(0.0, sessions, 0.6)
    probe.begin_if_due(0.25, sessions, 0.6)
    left = num_accepted
    for session in (each for each in sessions if each.probe_steps):
        for _ in range(2):
            probe.note_verdict(session, 2, min(left, 2))
            left -= min(left, 2)
    for number in range(6):
        probe.note_round(0.26 + 0.01 * number, 4, 1.0, 800.0)
    assert not probe.is_active
    probe.begin_if_due(0.33, sessions, 0.6)
    assert probe.is_active is is_followed


@pytest.mark.parametrize(("num_left", "begins"), [((9, 9, 9, 8), True), ((9, 9, 8, 8), False), ((8, 8, 8, 8), False)])
def test_a_probe_is_of_no_use_where_most_sessions_end_with_it(num_left: tuple[int, ...], begins: bool) -> None:
    """Two steps, and one that was asked for before they were judged, of two draft tokens and one of the target."""
    probe, sessions = AcceptanceProbe(), [ControlledSession(8, max_tokens=each) for each in num_left]
    sessions.append(ControlledSession(0))
    for now in (0.0, 0.25):
        probe.begin_if_due(now, sessions, 0.6)
    assert probe.is_active is begins
    assert all(session.num_left == 9 for session in probe.sessions)
    sessions[0].num_left = sessions[1].num_left = sessions[2].num_left = 9
    probe.begin_if_due(0.3, sessions, 0.6)
    assert probe.is_active, "as soon as there are some that do not"


def test_acceptance_counts_judged_tokens_and_differs_by_position() -> None:
    estimate, random = AcceptanceEstimate(4), np.random.default_rng(1)
    by_position = (0.5, 0.9, 0.9, 0.9)
    for _ in range(3000):
        draws = random.random(4) < by_position
        estimate.note(4, 4 if draws.all() else int(draws.argmin()), estimate.mean)
        estimate.fold()
    each = estimate.mean * estimate.by_position()
    assert each == pytest.approx(by_position, abs=0.1)


def test_an_acceptance_that_changes_is_followed_within_some_tokens() -> None:
    estimate, random = AcceptanceEstimate(8), np.random.default_rng(2)

    def judge(acceptance: float, count: int) -> None:
        for _ in range(count):
            estimate.note(1, int(random.random() < acceptance), estimate.mean)
            estimate.fold()

    judge(0.9, 2000)
    assert estimate.mean == pytest.approx(0.9, abs=0.06)
    judge(0.2, 80)
    assert estimate.mean < 0.45
    judge(0.9, 200)
    assert estimate.mean > 0.75


class Linear:
    """Seconds with round figures."""

    def __init__(self, constant: float, step: float, token: float) -> None:
        self._constant, self._step, self._token = constant, step, token

    def speculative(self, rows: float, draft_length: int) -> RoundPrice:
        return RoundPrice(self._constant + self._step * draft_length, self._token)


@pytest.mark.parametrize("times", [Linear(5.0, 0.8, 0.1), Linear(5.0, 0.2, 0.6), Linear(1.0, 2.0, 0.0)])
def test_the_choice_is_the_best_of_all(times: Linear) -> None:
    acceptance, limits = np.array([0.95, 0.7, 0.3]), np.array([4, 4, 4])
    useful = usefulness(np.ones(4), acceptance, limits, highest=0.98)
    chosen = best_choice(useful, times)
    assert chosen is not None

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = 3 + sum(useful[row, :length].sum() for row, length in enumerate(lengths))
        return float(tokens / times.speculative(3, max(lengths)).at(sum(lengths)))

    every = [lengths for lengths in itertools.product(range(5), repeat=3) if any(lengths)]
    assert chosen.rate == pytest.approx(rate(chosen.lengths))
    assert chosen.rate > 0.999 * max(map(rate, every))


def test_a_sessions_bound_holds() -> None:
    useful = usefulness(np.ones(8), np.array([0.9, 0.9]), np.array([2, 0]), highest=0.98)
    chosen = choice_of(useful, 2, Linear(5.0, 0.1, 0.0))
    assert chosen.lengths == (2, 0)
    assert best_choice(useful[1:], Linear(5.0, 0.1, 0.0)) is None


def test_rounds_take_what_was_measured_whatever_the_forwards_said() -> None:
    times = StepTimes()
    for _ in range(30):
        times.note_target(8, 40, 5e-3)
        times.note_draft(4, 32, 4e-3)
        times.note_speculative(8, 4, 32, 11e-3)
        times.note_plain(8, 4.3e-3)
    assert times.speculative(8, 4).at(32) == pytest.approx(11e-3, rel=0.01)
    assert times.plain(8) == pytest.approx(4.3e-3, rel=0.01)
    assert times.speculative(8, 2).at(16) < 11e-3
    assert (times.num_plain(8), times.num_speculative(8), times.num_plain(64)) == (30, 30, 0)


def test_a_switch_costs_what_bringing_text_to_drafts_was_seen_to_take() -> None:
    price = SwitchPrice()
    assert price.seconds(Mode.SPECULATIVE, 6e-3, 60_000) == pytest.approx(10 * 6e-3 + 100 * 6e-3)
    price.note_text(8, 1.0)  # too few to say anything
    price.note_text(4096, 4096 * 2e-6)
    assert price.seconds(Mode.SPECULATIVE, 6e-3, 60_000) == pytest.approx(10 * 6e-3 + 60_000 * 2e-6)
    price.note_text(70, 17e-3)  # which waited for a forward of the target
    price.note_text(1024, 1024 * 6e-6)
    assert price.seconds(Mode.SPECULATIVE, 6e-3, 60_000) == pytest.approx(10 * 6e-3 + 60_000 * 2e-6)
    for _ in range(8):
        price.note_text(1024, 1024 * 6e-6)
    assert price.seconds(Mode.SPECULATIVE, 6e-3, 60_000) == pytest.approx(10 * 6e-3 + 60_000 * 6e-6)
    assert price.seconds(Mode.PLAIN, 6e-3, 60_000) == pytest.approx(6 * 6e-3)


def test_small_forwards_at_a_texts_end_are_not_what_a_text_takes() -> None:
    """Each waited for a forward of the target; so dear a text would never be worth its trial."""
    price = SwitchPrice()
    for _ in range(12):
        price.note_text(256, 256 * 14e-6)
    for _ in range(50):
        price.note_text(80, 17e-3)
    assert price.text_seconds(17e-3, 98_304) == pytest.approx(98_304 * 14e-6)
    for _ in range(60):
        price.note_text(80, 17e-3)  # this draft computes no large ones any more
    assert price.text_seconds(17e-3, 98_304) > 98_304 * 100e-6


def speculate(timer: RoundTimer, num_rows: int, num_sessions: int) -> None:
    """One timed message of so many sessions that drafted."""
    batch = VerdictBatch(1.0)
    for _ in range(num_rows):
        batch.note(0.99, 4, 2)
    timer.note(batch, num_sessions, rows=num_rows, tokens=5 * num_rows, seconds=5e-3, is_settled=True)


def test_groups_that_take_turns_are_known_from_the_first_rounds() -> None:
    timer = RoundTimer()
    for _ in range(timer.num_cold_rounds(2) + 1):
        speculate(timer, 16, 32)
    assert timer.share == pytest.approx(0.5)


def test_rounds_of_one_session_say_nothing_of_groups() -> None:
    timer = RoundTimer()
    for _ in range(100):
        speculate(timer, 1, 1)
    speculate(timer, 4, 8)
    assert timer.share == pytest.approx(0.5)


def probe_round(timer: RoundTimer, *, drafting_ms: float, round_ms: float) -> None:
    """A round of 64 sessions of which eight draft four tokens each; its forward takes 17 ms."""
    batch = VerdictBatch(1.0)
    for _ in range(8):
        batch.note(None, 4, 3)
    batch.add_plain(56, 56, 56 * round_ms / 1e3)
    timer.note_proposals(4, 32, drafting_ms / 1e3)
    timer.note_probe(batch, 64, 17e-3)


def plain_round(timer: RoundTimer, *, tokens: int = 64, seconds: float = 17e-3) -> None:
    batch = VerdictBatch(1.0)
    batch.add_plain(64, 64, 64 * 17e-3)
    timer.note(batch, 64, rows=64, tokens=tokens, seconds=seconds, is_settled=False)


def test_of_a_probes_rounds_the_quickest_tells_what_each_stage_takes() -> None:
    expected = []
    for disturbed in (False, True):
        timer = RoundTimer()
        plain_round(timer, tokens=1024, seconds=1024 * 20e-6)
        for _ in range(8):
            plain_round(timer)
        assert timer.learns_from_probes(64)
        probe_round(timer, drafting_ms=25.0 if disturbed else 5.0, round_ms=80.0 if disturbed else 24.0)
        assert not timer.end_probe()  # one round tells nothing
        probe_round(timer, drafting_ms=25.0 if disturbed else 5.0, round_ms=80.0 if disturbed else 24.0)
        probe_round(timer, drafting_ms=5.0, round_ms=70.0 if disturbed else 24.0)
        probe_round(timer, drafting_ms=15.0 if disturbed else 5.0, round_ms=34.0 if disturbed else 24.0)
        assert not timer.knows_probed(64)
        assert timer.end_probe()
        known = [count for count in range(1, 257) if timer.knows_probed(count)]
        assert known == list(range(48, 128)), "some end, or some more come"
        assert not timer.end_probe()
        expected.append(timer.times.speculative(64, 4).at(256))
    assert expected[1] == pytest.approx(expected[0])


def test_forwards_of_short_prompts_tell_what_a_token_takes_until_longer_ones_do() -> None:
    timer = RoundTimer()
    plain_round(timer)
    plain_round(timer, tokens=64 + 40, seconds=30e-3)
    assert not timer.learns_from_probes(64)
    plain_round(timer, tokens=64 + 136, seconds=200 * 40e-6)
    assert timer.learns_from_probes(64)
    assert timer._prompt_token == pytest.approx(40e-6)
    plain_round(timer, tokens=1024, seconds=1024 * 20e-6)
    plain_round(timer, tokens=64 + 136, seconds=200 * 40e-6)
    assert timer._prompt_token == pytest.approx(20e-6)


def test_what_rows_that_do_not_draft_wait_for_is_no_round_of_all() -> None:
    """They may wait for a forward of those that do."""
    timer = RoundTimer()
    plain_round(timer, tokens=1024, seconds=1024 * 20e-6)
    for _ in range(8):
        plain_round(timer)
    for _ in range(3):
        probe_round(timer, drafting_ms=5.0, round_ms=200.0)
    timer.end_probe()
    scored = timer.times.longest_forward(64, 4, 256)
    assert timer.times.speculative(64, 4).at(256) < scored + 0.5 * 17e-3 + 10e-3


def lacking(*lags: int) -> list[ControlledSession]:
    sessions = [ControlledSession(8) for _ in lags]
    for session, lag in zip(sessions, lags, strict=True):
        session.draft_lag = lag
    return sessions


def test_a_catch_up_lasts_as_long_as_drafts_catch_up() -> None:
    catch_up = CatchUp()
    for number in range(8):  # one draft each 0.9 s
        catch_up.update(
            0.9 * number, lacking(*(1000 for _ in range(8 - number)), *(20 for _ in range(number))), is_wanted=True
        )
        assert catch_up.is_active
    catch_up.update(8.1, lacking(*(64 for _ in range(8))), is_wanted=True)
    assert not catch_up.is_active  # these few are brought with the next step but one


def test_a_draft_that_catches_up_no_more_is_not_waited_for() -> None:
    catch_up = CatchUp()
    catch_up.update(0.0, lacking(1000, 1000, 0, 0), is_wanted=True)
    catch_up.update(0.8, lacking(1000, 0, 0, 0), is_wanted=True)
    catch_up.update(1.7, lacking(1000, 0, 0, 0), is_wanted=True)
    assert catch_up.is_active
    catch_up.update(1.9, lacking(1000, 0, 0, 0), is_wanted=True)
    assert not catch_up.is_active
    catch_up.update(2.0, lacking(1000, 0, 0, 0), is_wanted=True)
    assert not catch_up.is_active
    catch_up.update(2.1, lacking(1000, 0, 0, 0), is_wanted=False)
    catch_up.update(2.2, lacking(1000, 1000, 0, 0), is_wanted=True)
    assert catch_up.is_active


def test_the_longest_pause_between_explorations_grows_from_the_first_one_on() -> None:
    budget = ExplorationBudget(shortest_pause_s=0.25, longest_pause_s=20.0, first_pause_s=4.0)
    now, pauses = 0.0, []
    for _ in range(5):
        budget.spend(now, 1.0)
        began = now
        while not budget.is_due(now):
            now += 0.125
        pauses.append(now - began)
    assert pauses == [4.0, 8.0, 16.0, 20.0, 20.0]


def test_few_judged_tokens_leave_a_large_error() -> None:
    errors = []
    for num_verdicts in (2, 20):
        acceptance = AcceptanceEstimate(8)
        for _ in range(num_verdicts):
            acceptance.note(4, 2, acceptance.mean)
            acceptance.fold()
        errors.append(acceptance.error)
    assert 0.15 > errors[0] > 2.0 * errors[1] > 0.0


def test_the_error_of_tokens_is_that_of_the_acceptance_times_the_position() -> None:
    useful = usefulness(np.ones(3), np.array([0.8, 0.5]), np.array([3, 3]), highest=0.98)
    more = usefulness(np.ones(3), np.array([0.8, 0.5]) * 1.001, np.array([3, 3]), highest=0.98)
    choice = choice_of(useful, 3, Linear(5.0, 0.0, 0.0))
    gained = (choice_of(more, 3, Linear(5.0, 0.0, 0.0)).tokens - choice.tokens) / choice.tokens
    assert relative_error(useful, choice, 0.001) == pytest.approx(gained, rel=0.01)


@pytest.mark.parametrize("is_trial", [False, True])
def test_all_sessions_draft_in_a_trial_though_few_are_expected_to_gain(is_trial: bool) -> None:
    """Drafts seem so dear that one session drafts at most: as nothing then says what they take, it would stay so."""
    times, planner = StepTimes(), LengthPlanner(8)
    for tokens in (8, 32, 128):
        times.note_target(32, 32 + tokens, 6e-3)
        times.note_draft(2, tokens, 2e-3 + 3e-4 * tokens)
    for _ in START_LENGTHS:
        planner.note_round()
    sessions = [ControlledSession(8) for _ in range(31)] + [ControlledSession(0)]
    limits = np.array([session.limit for session in sessions])
    useful = usefulness(np.ones(8), np.linspace(0.6, 0.5, 32), limits, highest=0.98)
    best = best_choice(useful, times)
    assert best is not None
    planner.set_lengths(sessions, useful, best, times, 1.0, is_trial=is_trial)
    lengths = [session.length for session in sessions]
    assert lengths[31] == 0
    assert sum(length > 0 for length in lengths) == (31 if is_trial else 1)
