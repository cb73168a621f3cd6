"""Acceptance, and the draft lengths with the most expected tokens per second."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outrider_coordinator.speculation.acceptance import PRIOR, Acceptance
from outrider_coordinator.speculation.comparison import Comparison
from outrider_coordinator.speculation.expectation import Expectation, RoundSeconds, best_choice
from outrider_coordinator.speculation.rounds import RoundLearner
from outrider_coordinator.speculation.sessions import ControlledSession, Mode, Population
from outrider_coordinator.speculation.step_costs import StepCosts


def linear(per_token: float, per_step: float, fixed: float) -> RoundSeconds:
    return lambda drafted: fixed + per_step * np.arange(1, len(drafted) + 1) + per_token * drafted


def test_acceptance_begins_with_a_prior_and_follows_what_was_judged() -> None:
    acceptance = Acceptance(4)
    assert acceptance.mean == pytest.approx(PRIOR)
    for _ in range(200):
        acceptance.note(4, 1)
        acceptance.fold()
    assert acceptance.mean == pytest.approx(0.5, abs=0.02)
    first, second, *rest = acceptance.by_position().tolist()
    assert first > 0.85 and second < 0.15
    assert rest == pytest.approx([acceptance.mean] * 2)


def test_acceptance_changes_with_the_text() -> None:
    acceptance = Acceptance(4)
    for accepted, _ in itertools.product((4, 0), range(400)):
        acceptance.note(4, accepted)
        acceptance.fold()
    assert acceptance.mean < 0.35


@pytest.mark.parametrize(("acceptance", "per_step"), [(0.9, 0.1), (0.5, 0.1), (0.9, 0.5), (0.7, 0.0)])
def test_the_best_length_is_found(acceptance: float, per_step: float) -> None:
    seconds = linear(0.05, per_step, 1.0)
    choice = best_choice(np.full(8, acceptance), [8, 8], seconds)
    assert choice is not None
    tokens = [2 + 2 * sum(acceptance**place for place in range(1, length + 1)) for length in range(1, 9)]
    rates = tokens / seconds(np.arange(1, 9))
    assert choice.length == 1 + int(np.argmax(rates))
    assert choice.tokens == pytest.approx(tokens[choice.length - 1])
    assert choice.tokens / choice.seconds == pytest.approx(max(rates))


def test_tokens_past_a_sessions_limit_are_not_counted() -> None:
    choice = best_choice(np.full(4, 0.5), [4, 1, 0], lambda drafted: np.array([9.0, 9.0, 9.0, drafted[3]]))
    assert choice is not None
    assert choice.length == 4
    assert choice.seconds == pytest.approx(5 / 3)
    assert choice.tokens == pytest.approx(3 + 0.5 + 0.25 + 0.125 + 0.0625 + 0.5)


def test_nothing_is_chosen_where_no_session_may_draft() -> None:
    assert best_choice(np.full(8, 0.9), [0, 0], linear(0.0, 0.0, 1.0)) is None


def test_requests_that_take_longer_than_usual_are_expected_to_take_as_long_again() -> None:
    """Otherwise nothing would pay for a change of the mode any more."""
    costs = StepCosts()
    population, session = Population(), ControlledSession(4)
    expected = Expectation(population, costs, Acceptance(4), RoundLearner(costs))
    session.began_s = 0.0
    population.add(session)
    assert expected.estimate()
    assert expected.left_s(5.0, is_speculating=False) == pytest.approx(5.0)  # none has ended
    expected.request_s.note(2.0)
    found = [expected.left_s(now, is_speculating=False) for now in (0.5, 5.0)]
    assert found == pytest.approx([1.5, 5.0])


def test_only_changes_of_the_mode_are_counted() -> None:
    costs = StepCosts()
    population = Population()
    comparison = Comparison(population, Expectation(population, costs, Acceptance(4), RoundLearner(costs)))
    taken = [comparison.take(mode, 0.0) for mode in (Mode.PLAIN, Mode.SPECULATIVE, Mode.SPECULATIVE)]
    assert taken == [False, True, False]
    assert comparison.num_switches == 1
