"""State of a session on its draft and on its target: what a verdict, a new opening and a loss leave of it."""

from __future__ import annotations

import pytest

from outrider.errors import ProtocolError
from outrider.ports import Score
from outrider_coordinator.session.actions import Fail
from outrider_coordinator.session.draft_side import Drafted, DraftFacts, DraftSide
from outrider_coordinator.session.readiness import Readiness
from outrider_coordinator.session.table import Row
from outrider_coordinator.session.target_side import TargetSide
from tests.coordinator.session.test_step_ended import command, scores, started


def opened_side(*, layers: tuple[int, ...] = ()) -> DraftSide:
    """A draft that holds ten tokens since its opening with generation 2."""
    side = DraftSide(Row(), Readiness.CLOSED, DraftFacts(hidden_state_layers=layers))
    side.note_opened(2)
    side.held, side.has_answered = 10, True
    return side


@pytest.mark.parametrize(
    ("opened", "num_accepted", "held"),
    [(2, 0, 10), (2, 2, 12), (2, 3, 12), (1, 2, 10)],
    ids=["none accepted", "some", "all: the last has no KV", "drafted before it was opened anew"],
)
def test_a_draft_holds_its_own_accepted_tokens(opened: int, num_accepted: int, held: int) -> None:
    side = opened_side()
    side.note_verdict(Drafted((7, 8, 9), None, opened), num_accepted)
    assert side.held == held


def test_a_draft_that_is_opened_anew_says_first_what_it_holds() -> None:
    side = opened_side(layers=(1, 3))
    assert side.wants_states
    side.lose(Readiness.CLOSED)
    side.note_opened(3)
    assert side.held == 0 and not side.wants_states


def test_a_target_that_lost_the_session_owes_no_answer() -> None:
    side = TargetSide(Row())
    side.note_opened(1)
    side.held, side.asked, side.part, side.is_held_back = 9, 2, 5, True
    side.lose(Readiness.AWAY)
    assert [side.held, side.asked, side.part, side.is_held_back, side.is_lost] == [0, None, None, False, True]


def test_scores_of_another_part_of_a_text_fail_the_session() -> None:
    loop, actions = started()
    loop.target.part = 2
    loop.on_target_event(scores(command(actions, Score), 5))
    (ended,) = [action for action in loop.take_actions() if isinstance(action, Fail)]
    assert isinstance(ended.error, ProtocolError) and "3 tokens, not on the part" in str(ended.error)
