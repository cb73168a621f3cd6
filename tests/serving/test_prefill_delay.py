"""A prompt's chunk waits for running sessions that will be back before it could be done."""

from __future__ import annotations

from outrider.serving.token_budget import LONGEST_ABSENCE_NS, PrefillDelayPolicy

AWAY, CHUNK = 100, 60
ONE, OTHER = (1, 1), (1, 2)


def _prefill_delay(*, chunk: int = CHUNK) -> PrefillDelayPolicy:
    """Delay policy that has seen both times."""
    prefill_delay = PrefillDelayPolicy()
    prefill_delay.note_answer(ONE, 0)
    prefill_delay.note_return(ONE, AWAY)
    prefill_delay.note_chunk(chunk)
    return prefill_delay


def test_nobody_is_waited_for_before_it_was_seen_how_long_they_take() -> None:
    prefill_delay = PrefillDelayPolicy()
    prefill_delay.note_answer(ONE, 0)
    assert prefill_delay.wait_ns(10) == 0
    prefill_delay.note_return(ONE, AWAY)
    prefill_delay.note_answer(ONE, 200)
    assert prefill_delay.wait_ns(210) == 0


def test_a_chunk_goes_that_will_be_done_before_they_are_back_and_another_waits() -> None:
    prefill_delay = _prefill_delay()
    prefill_delay.note_answer(ONE, 1000)
    assert prefill_delay.wait_ns(1000 + AWAY - CHUNK) == 0
    assert prefill_delay.wait_ns(1000 + AWAY - CHUNK + 1) == AWAY // 2 + CHUNK - 1


def test_who_is_late_is_waited_for_no_more() -> None:
    prefill_delay = _prefill_delay(chunk=10 * AWAY)
    prefill_delay.note_answer(ONE, 1000)
    assert prefill_delay.wait_ns(1000 + AWAY) == AWAY // 2
    assert prefill_delay.wait_ns(1000 + AWAY + AWAY // 2) == 0


def test_who_ended_or_whose_link_is_gone_is_not_waited_for() -> None:
    prefill_delay = _prefill_delay(chunk=10 * AWAY)
    prefill_delay.note_answer(ONE, 1000)
    prefill_delay.note_answer(OTHER, 1000)
    prefill_delay.note_end(ONE)
    assert prefill_delay.wait_ns(1010) > 0
    prefill_delay.drop_link(1)
    assert prefill_delay.wait_ns(1010) == 0


def test_the_last_to_return_is_waited_for() -> None:
    prefill_delay = _prefill_delay(chunk=10 * AWAY)
    prefill_delay.note_answer(ONE, 1000)
    prefill_delay.note_answer(OTHER, 1040)
    assert prefill_delay.wait_ns(1050) == 140
    prefill_delay.note_return(ONE, 1100)
    assert prefill_delay.wait_ns(1100) == 90


def test_a_long_absence_is_neither_counted_nor_waited_out() -> None:
    prefill_delay = _prefill_delay(chunk=10 * AWAY)
    prefill_delay.note_answer(ONE, 1000)
    prefill_delay.note_return(ONE, 1001 + LONGEST_ABSENCE_NS)
    prefill_delay.note_answer(ONE, 2 * LONGEST_ABSENCE_NS)
    assert prefill_delay.wait_ns(2 * LONGEST_ABSENCE_NS) == 1.5 * AWAY
    slow = PrefillDelayPolicy()
    slow.note_answer(ONE, 0)
    slow.note_return(ONE, LONGEST_ABSENCE_NS)
    slow.note_chunk(10 * LONGEST_ABSENCE_NS)
    slow.note_answer(ONE, 0)
    assert slow.wait_ns(1) == LONGEST_ABSENCE_NS - 1


def test_what_was_seen_last_counts_a_fifth() -> None:
    prefill_delay = _prefill_delay(chunk=10 * AWAY)
    prefill_delay.note_answer(ONE, 1000)
    prefill_delay.note_return(ONE, 1000 + 2 * AWAY)
    prefill_delay.note_answer(ONE, 2000)
    assert prefill_delay.wait_ns(2000) == 180


def test_who_asked_for_something_else_before_it_was_answered_was_not_away() -> None:
    prefill_delay = _prefill_delay()
    prefill_delay.note_answer(ONE, 1000)
    prefill_delay.note_return(ONE, 100)
    prefill_delay.note_answer(ONE, 2000)
    assert prefill_delay.wait_ns(2000 + AWAY - CHUNK + 1) == AWAY // 2 + CHUNK - 1
