"""What is remembered of a session is its own."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.ports import Open
from outrider.sampling.session_cache import MOST_REMEMBERED, SessionCache
from outrider.types import SamplingParams
from tests.support.core_driver import open_session


def opening() -> Open:
    return open_session(0, prompt_length=1, max_length=9, num_token_ids=9)


def test_each_opening_is_worked_out_once_and_gets_its_own() -> None:
    worked_out: list[Open] = []

    def note(open_: Open) -> Open:
        worked_out.append(open_)
        return open_

    remembering = SessionCache(note)
    opens = [opening() for _ in range(MOST_REMEMBERED)]
    assert all(remembering(open_) is open_ for open_ in opens + opens)
    assert len(worked_out) == MOST_REMEMBERED


def test_when_there_are_too_many_the_first_is_forgotten() -> None:
    remembering = SessionCache(id)
    opens = [opening() for _ in range(MOST_REMEMBERED + 1)]
    assert [remembering(open_) for open_ in opens] == [id(open_) for open_ in opens]
    assert [id(open_) for open_ in opens[1:]] == list(remembering._found)
    assert remembering(opens[0]) == id(opens[0])


@pytest.mark.parametrize(
    "lists",
    [
        {"allowed_token_ids": tuple(range(300))},
        {"logit_bias": tuple((token_id, 1.0) for token_id in range(300))},
        {"bad_words": tuple((token_id, 0) for token_id in range(150))},
    ],
)
def test_long_lists_are_not_kept_for_sessions_that_may_have_ended(lists: dict[str, Any]) -> None:
    remembering = SessionCache(id)
    sampling = SamplingParams(**lists)
    open_ = open_session(0, prompt_length=1, max_length=9, num_token_ids=9, sampling=sampling)
    assert remembering(open_) == id(open_)
    assert not remembering._found


def test_it_keeps_what_it_remembers_from_being_mistaken() -> None:
    """An Open that is gone would leave its place in memory to another."""
    remembering = SessionCache(lambda open_: open_.seed)
    for seed in range(100):
        assert remembering(open_session(0, prompt_length=1, max_length=9, num_token_ids=9, seed=seed)) == seed
