"""The size of chunks beside running sessions, by what forwards took."""

from __future__ import annotations

import pytest

from outrider.serving.token_budget import PrefillChunkSize

MICROSECOND = 1_000
WITHOUT_US = 5_000


def after(*forwards: tuple[int, int], most: int = 256) -> PrefillChunkSize:
    """Forwards of (microseconds, tokens of prompts)."""
    size = PrefillChunkSize(most)
    for duration_us, num_tokens in forwards:
        size.note_forward(duration_us * MICROSECOND, num_tokens)
    return size


def test_chunks_are_as_large_as_may_be_while_nothing_is_known_or_they_cost_little() -> None:
    assert after().tokens == 256
    assert after((WITHOUT_US, 0)).tokens == 256
    assert after((20_000, 256)).tokens == 256  # more than what is not known
    assert after((WITHOUT_US, 0), (7_000, 256)).tokens == 256
    assert after((WITHOUT_US, 0), (4_000, 256)).tokens == 256


@pytest.mark.parametrize(("a_token_us", "expected"), [(30, 144), (45, 96), (800, 64)])
def test_chunks_are_cut_so_that_a_forward_takes_less_than_twice_its_time(a_token_us: int, expected: int) -> None:
    size = after((WITHOUT_US, 0), (WITHOUT_US + 256 * a_token_us, 256))
    assert size.tokens == expected
    assert size.tokens == 64 or size.tokens * a_token_us < WITHOUT_US


def test_the_last_forwards_count_most_and_one_that_was_held_up_counts_little() -> None:
    steady = [(WITHOUT_US + 256 * 10, 256)] * 20
    size = after((WITHOUT_US, 0), *steady, (WITHOUT_US + 256 * 20, 256))
    assert size.tokens == 256
    size = after((WITHOUT_US, 0), *steady, *[(WITHOUT_US + 256 * 45, 256)] * 20)
    assert size.tokens == 96


def test_a_new_prompt_begins_anew() -> None:
    size = after((WITHOUT_US, 0), (200_000, 256))
    size.note_end_of_prompts()
    assert size.tokens == 256
