"""Step costs: interpolation of what services measured, and what traffic corrects."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.types import StepCost
from outrider_coordinator.speculation.step_costs import Average, StepCosts, StepTable

MS = 1_000_000


def cost(rows: int, length: int, ms: float, context: int = 128) -> StepCost:
    return StepCost(rows, length, context, round(ms * MS))


TARGET = [cost(1, 1, 4.0), cost(1, 5, 5.0), cost(16, 1, 6.0), cost(16, 5, 9.0), cost(16, 1, 8.0, context=1128)]
DRAFT = [cost(1, 1, 1.0), cost(1, 5, 5.0), cost(16, 1, 2.0), cost(16, 5, 10.0)]


@pytest.mark.parametrize(
    ("rows", "length", "context", "milliseconds"),
    [
        (1, 1, 0, 4.0), (1, 3, 0, 4.5), (16, 5, 128, 9.0), (16, 2.5, 0, 7.125), (31, 1, 0, 8.0), (1, 9, 0, 6.0),
        (16, 1, 628, 7.0),
    ],
)  # fmt: skip
def test_a_table_is_interpolated_and_goes_on_past_its_ends(
    rows: int, length: float, context: int, milliseconds: float
) -> None:
    assert StepTable(TARGET).seconds(rows, length, context) == pytest.approx(1e-3 * milliseconds)


def test_one_measured_batch_size_is_taken_for_all() -> None:
    table = StepTable([cost(1, 1, 4.0)])
    assert table.seconds(64, 5) == pytest.approx(4e-3)


def test_a_profile_that_is_off_by_a_factor_is_corrected_by_rounds() -> None:
    costs = StepCosts(TARGET, DRAFT)
    for _ in range(40):
        costs.note_plain_round(16, 0, 1.3 * 6e-3)
        costs.note_scoring(16, 5, 0, 0.8 * 9e-3)
        costs.note_draft(16, 5, 0, 1.5 * 10e-3)
    assert costs.plain(16, 0) == pytest.approx(1.3 * 6e-3, rel=0.03)
    forwards_s = costs.speculative(16, 0, np.full(5, 4.0))[-1] - costs.overhead(16)
    assert forwards_s == pytest.approx(0.8 * 9e-3 + 1.5 * 10e-3, rel=0.03)


def test_the_time_between_forwards_is_learned_by_batch_size() -> None:
    costs = StepCosts(TARGET, DRAFT)
    for _ in range(60):
        costs.note_speculative_round(16, 4.0, 5, 0, 9e-3 + 10e-3 + 4e-3)
    assert costs.overhead(16) == pytest.approx(4e-3, rel=0.05)
    assert costs.overhead(64) == costs.overhead(16)  # the nearest that is known
    assert costs.num_speculative_rounds(16) and not costs.num_speculative_rounds(64)


def test_text_costs_a_draft_less_than_the_target_by_the_ratio_of_their_steps() -> None:
    assert StepCosts(TARGET, DRAFT).text_token_seconds == pytest.approx(StepTable(TARGET).token_seconds / 2)
    assert 5e-6 < StepCosts().text_token_seconds < 2e-5


def test_an_outlier_moves_an_average_by_its_limit_only() -> None:
    average = Average(1.0)
    average.note(100.0, 0.5)
    assert average.value == 1.5
    for _ in range(50):
        average.note(1.0, 0.5)
    assert average.value == pytest.approx(1.0, abs=0.02)


def test_tables_that_come_later_take_the_place_of_usual_ones() -> None:
    costs = StepCosts()
    assert not costs.has_profile
    costs.provide(TARGET, ())
    costs.provide([cost(1, 1, 99.0)], DRAFT)
    assert costs.has_profile
    assert costs.plain(1, 0) == pytest.approx(4e-3)
