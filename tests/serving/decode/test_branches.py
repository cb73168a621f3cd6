"""Choice of branches: the likeliest outcomes of a step by the draft's own scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.model_executor.draft_loop.results import RunnersUp
from outrider.serving.decode.branches import LEAST_PROBABILITY, Outcome

NEVER = -1


def outcome(token_ids: list[int], named: list[list[tuple[int, float]]]) -> Outcome:
    ids = np.array([[token_id for token_id, _ in own] for own in named], dtype=np.int32)
    gaps = np.array([[-math.log(odds) for _, odds in own] for own in named], dtype=np.float32)
    return Outcome(10, token_ids, RunnersUp(ids, gaps))


def test_choices_are_the_likeliest_outcomes() -> None:
    # Odds to the drawn token: 1 of 1.5 is drawn first, then 1 of 2, then 1 of 1.25.
    named = [[(7, 0.4), (8, 0.1)], [(5, 0.75), (6, 0.25)], [(3, 0.25), (NEVER, 1.0)]]
    choices = outcome([1, 21, 22, 23], named).choices(9)
    expected = [
        (0.4 / 1.5, 11, 7),
        (0.75 / 1.5 / 2, 12, 5),
        (0.25 / 1.5 / 2, 12, 6),
        (0.1 / 1.5, 11, 8),
        (0.25 / 1.5 / 2 / 1.25, 13, 3),
    ]
    assert [choice[1:] for choice in choices] == [each[1:] for each in sorted(expected, reverse=True)]
    assert [choice.probability for choice in choices] == pytest.approx([each[0] for each in sorted(expected)[::-1]])
    assert outcome([1, 21, 22, 23], named).choices(2) == choices[:2]
    assert outcome([1, 21, 22, 23], named).choices(0) == []


def test_the_first_of_drawn_tokens_has_no_choices() -> None:
    """A guess that the loop has drawn itself: by the time its runners-up are known, the target knows more."""
    choices = outcome([21, 22], [[(7, 0.5)], [(8, 0.5)]]).choices(9)
    assert [choice[1:] for choice in choices] == [(11, 8)]
    assert outcome([21], [[(7, 0.5)]]).choices(9) == []


def test_outcomes_that_hardly_come_true_are_left_out() -> None:
    rare = LEAST_PROBABILITY / 2
    assert outcome([1, 21], [[(7, rare), (8, 3 * rare)]]).choices(9)[0].token_id == 8
    assert len(outcome([1, 21], [[(7, rare), (8, 3 * rare)]]).choices(9)) == 1
    assert Outcome(10, [1, 21]).choices(9) == []
