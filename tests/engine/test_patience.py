"""A prompt's chunk waits for running sessions that will be back before it could be done."""

from __future__ import annotations

from outrider.engine.patience import LONGEST_ABSENCE_NS, Patience

AWAY, CHUNK = 100, 60
ONE, OTHER = (1, 1), (1, 2)


def _patience(*, chunk: int = CHUNK) -> Patience:
    """That has seen how long both take."""
    patience = Patience()
    patience.note_answer(ONE, 0)
    patience.note_return(ONE, AWAY)
    patience.note_chunk(chunk)
    return patience


def test_nobody_is_waited_for_before_it_was_seen_how_long_they_take() -> None:
    patience = Patience()
    patience.note_answer(ONE, 0)
    assert patience.wait_ns(10) == 0
    patience.note_return(ONE, AWAY)
    patience.note_answer(ONE, 200)
    assert patience.wait_ns(210) == 0


def test_a_chunk_goes_that_will_be_done_before_they_are_back_and_another_waits() -> None:
    patience = _patience()
    patience.note_answer(ONE, 1000)
    assert patience.wait_ns(1000 + AWAY - CHUNK) == 0
    assert patience.wait_ns(1000 + AWAY - CHUNK + 1) == AWAY // 2 + CHUNK - 1


def test_who_is_late_is_waited_for_no_more() -> None:
    patience = _patience(chunk=10 * AWAY)
    patience.note_answer(ONE, 1000)
    assert patience.wait_ns(1000 + AWAY) == AWAY // 2
    assert patience.wait_ns(1000 + AWAY + AWAY // 2) == 0


def test_who_ended_or_whose_link_is_gone_is_not_waited_for() -> None:
    patience = _patience(chunk=10 * AWAY)
    patience.note_answer(ONE, 1000)
    patience.note_answer(OTHER, 1000)
    patience.note_end(ONE)
    assert patience.wait_ns(1010) > 0
    patience.drop_link(1)
    assert patience.wait_ns(1010) == 0


def test_the_last_to_return_is_waited_for() -> None:
    patience = _patience(chunk=10 * AWAY)
    patience.note_answer(ONE, 1000)
    patience.note_answer(OTHER, 1040)
    assert patience.wait_ns(1050) == 140
    patience.note_return(ONE, 1100)
    assert patience.wait_ns(1100) == 90


def test_a_long_absence_is_neither_counted_nor_waited_out() -> None:
    patience = _patience(chunk=10 * AWAY)
    patience.note_answer(ONE, 1000)
    patience.note_return(ONE, 1001 + LONGEST_ABSENCE_NS)
    patience.note_answer(ONE, 2 * LONGEST_ABSENCE_NS)
    assert patience.wait_ns(2 * LONGEST_ABSENCE_NS) == 1.5 * AWAY
    slow = Patience()
    slow.note_answer(ONE, 0)
    slow.note_return(ONE, LONGEST_ABSENCE_NS)
    slow.note_chunk(10 * LONGEST_ABSENCE_NS)
    slow.note_answer(ONE, 0)
    assert slow.wait_ns(1) == LONGEST_ABSENCE_NS - 1


def test_what_was_seen_last_counts_a_fifth() -> None:
    patience = _patience(chunk=10 * AWAY)
    patience.note_answer(ONE, 1000)
    patience.note_return(ONE, 1000 + 2 * AWAY)
    patience.note_answer(ONE, 2000)
    assert patience.wait_ns(2000) == 180


def test_who_asked_for_something_else_before_it_was_answered_was_not_away() -> None:
    patience = _patience()
    patience.note_answer(ONE, 1000)
    patience.note_return(ONE, 100)
    patience.note_answer(ONE, 2000)
    assert patience.wait_ns(2000 + AWAY - CHUNK + 1) == AWAY // 2 + CHUNK - 1
