"""State of a session on its target: what a loss leaves of it, and answers to a part of a text."""

from __future__ import annotations

from outrider.errors import ProtocolError
from outrider.ports import Score
from outrider_coordinator.session.actions import Fail
from outrider_coordinator.session.readiness import Readiness
from outrider_coordinator.session.table import Row
from outrider_coordinator.session.target_side import TargetSide
from tests.coordinator.session.test_step_ended import command, scores, started


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
