"""Acceptance, and the draft lengths with the most expected tokens per second."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from outrider_coordinator.speculation.acceptance import HIGHEST, PRIOR, Acceptance, SessionAcceptance
from outrider_coordinator.speculation.goodput import best_choice, choice_of, usefulness


def linear(per_token: float, per_step: float, fixed: float) -> Callable[[int], Callable[[float], float]]:
    return lambda longest: lambda drafted: fixed + per_step * longest + per_token * drafted


def test_acceptance_begins_with_a_prior_and_follows_what_was_judged() -> None:
    acceptance = Acceptance(4)
    assert acceptance.mean == pytest.approx(PRIOR)
    for _ in range(200):
        assert acceptance.note(4, 1) == 2
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


def test_what_was_judged_counts_less_once_decoding_is_plain() -> None:
    acceptance = Acceptance(2)
    for _ in range(50):
        acceptance.note(2, 2)
    acceptance.fold()
    before, error = acceptance.num_judged, acceptance.error
    acceptance.lighten()
    assert acceptance.num_judged == before / 2
    assert acceptance.error > error


def test_a_session_is_known_by_its_own_tokens_the_more_were_judged() -> None:
    session = SessionAcceptance()
    assert session.relative(0.8) == 1.0
    session.note(4, 4, 0.5)
    few = session.relative(0.5)
    for _ in range(40):
        session.note(4, 4, 0.5)
    assert 1.0 < few < 1.2 < session.relative(0.5) <= 2.0


def test_usefulness_falls_with_the_position_and_ends_at_the_limit() -> None:
    useful = usefulness(np.full(3, 0.8), np.array([1.0, 2.0, 1.0]), np.array([3, 3, 1]))
    assert useful[0].tolist() == pytest.approx([0.8, 0.64, 0.512])
    assert useful[1].tolist() == pytest.approx([HIGHEST, HIGHEST**2, HIGHEST**3])
    assert useful[2].tolist() == pytest.approx([0.8, 0.0, 0.0])


@pytest.mark.parametrize(("acceptance", "per_step"), [(0.9, 0.1), (0.5, 0.1), (0.9, 0.5), (0.7, 0.0)])
def test_the_best_length_of_one_session_is_found(acceptance: float, per_step: float) -> None:
    useful = usefulness(np.full(8, acceptance), np.ones(1), np.array([8]))
    seconds = linear(0.05, per_step, 1.0)
    choice = best_choice(useful, seconds)
    assert choice is not None
    rates = [(1 + useful[0, :length].sum()) / seconds(length)(length) for length in range(1, 9)]
    assert choice.longest == 1 + int(np.argmax(rates))
    assert choice.rate == pytest.approx(max(rates))


def test_sessions_whose_drafts_are_rejected_draft_less() -> None:
    useful = usefulness(np.full(8, 0.9), np.array([1.0, 1.0, 0.2]), np.array([8, 8, 8]))
    choice = choice_of(useful, 6, linear(0.6, 0.02, 1.0)(6))
    assert choice.lengths[0] >= choice.lengths[1] > choice.lengths[2]


def test_nothing_is_chosen_where_no_session_may_draft() -> None:
    assert best_choice(usefulness(np.full(8, 0.9), np.ones(2), np.zeros(2)), linear(0.0, 0.0, 1.0)) is None
