"""The size of chunks beside running sessions, by what forwards took."""

from __future__ import annotations

import pytest

from outrider.serving.token_budget import PrefillChunkSize

MICROSECOND = 1_000
WITHOUT_US = 5_000
RUNNING = 8


def after(*forwards: tuple[int, int], most: int = 256) -> PrefillChunkSize:
    """Forwards of (microseconds, tokens of prompts)."""
    size = PrefillChunkSize(most)
    for duration_us, num_tokens in forwards:
        size.note_forward(duration_us * MICROSECOND, num_tokens, RUNNING)
    return size


def test_chunks_are_as_large_as_may_be_while_nothing_is_known_or_they_cost_little() -> None:
    assert after().tokens(RUNNING, 1) == 256
    assert after((WITHOUT_US, 0)).tokens(RUNNING, 1) == 256
    assert after((20_000, 256)).tokens(RUNNING, 1) == 256  # more than what is not known
    assert after((WITHOUT_US, 0), (7_000, 256)).tokens(RUNNING, 1) == 256
    assert after((WITHOUT_US, 0), (4_000, 256)).tokens(RUNNING, 1) == 256


@pytest.mark.parametrize(("a_token_us", "expected"), [(30, 144), (45, 96), (800, 64)])
def test_chunks_are_cut_so_that_a_forward_takes_less_than_twice_its_time(a_token_us: int, expected: int) -> None:
    size = after((WITHOUT_US, 0), (WITHOUT_US + 256 * a_token_us, 256))
    assert size.tokens(RUNNING, 1) == expected
    assert size.tokens(RUNNING, 1) == 64 or size.tokens(RUNNING, 1) * a_token_us < WITHOUT_US


def test_the_last_forwards_count_most_and_one_that_was_held_up_counts_little() -> None:
    steady = [(WITHOUT_US + 256 * 10, 256)] * 20
    size = after((WITHOUT_US, 0), *steady, (WITHOUT_US + 256 * 20, 256))
    assert size.tokens(RUNNING, 1) == 256
    size = after((WITHOUT_US, 0), *steady, *[(WITHOUT_US + 256 * 45, 256)] * 20)
    assert size.tokens(RUNNING, 1) == 96


def test_a_new_prompt_begins_anew() -> None:
    size = after((WITHOUT_US, 0), (200_000, 256))
    size.note_end_of_prompts()
    assert size.tokens(RUNNING, 1) == 256


def test_forwards_are_compared_with_those_of_as_many_sessions() -> None:
    """Forwards have a chunk each while prompts wait, and more and more sessions run."""
    size = after((WITHOUT_US, 0))
    size.note_forward(2 * WITHOUT_US * MICROSECOND, 0, 200)
    size.note_forward(WITHOUT_US * MICROSECOND, 0, 130)  # as the load before ended
    for _ in range(3):
        size.note_forward((2 * WITHOUT_US + 256 * 30) * MICROSECOND, 256, 200)
    assert size.tokens(200, 1) == 256
    assert size.tokens(RUNNING, 1) == 144


@pytest.mark.parametrize(("num_prompts", "expected"), [(1, 256), (2, 256), (3, 512), (5, 1024), (100, 1024)])
def test_chunks_are_larger_where_more_prompts_wait_than_sessions_run(num_prompts: int, expected: int) -> None:
    assert after().tokens(RUNNING, num_prompts) == expected


def test_larger_chunks_leave_room_in_their_forward() -> None:
    assert [after().tokens(RUNNING, 100, num_decode_rows) for num_decode_rows in (64, 700, 900)] == [960, 324, 256]


def test_the_bound_of_many_prompts_follows_what_forwards_took() -> None:
    size = after((WITHOUT_US, 0), (WITHOUT_US + 256 * 45, 256))
    assert [size.tokens(RUNNING, num_prompts) for num_prompts in (1, 3, 100)] == [96, 192, 384]
