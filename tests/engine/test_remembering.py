"""What is remembered of a session is its own."""

from __future__ import annotations

from outrider.engine.remembering import MOST_REMEMBERED, Remembering
from outrider.ports import Open
from tests.support.core_driver import open_session


def opening() -> Open:
    return open_session(0, prompt_length=1, max_length=9, num_token_ids=9)


def test_each_opening_is_worked_out_once_and_gets_its_own() -> None:
    worked_out: list[Open] = []

    def note(open_: Open) -> Open:
        worked_out.append(open_)
        return open_

    remembering = Remembering(note)
    opens = [opening() for _ in range(MOST_REMEMBERED)]
    assert all(remembering(open_) is open_ for open_ in opens + opens)
    assert len(worked_out) == MOST_REMEMBERED


def test_when_there_are_too_many_all_are_worked_out_anew() -> None:
    remembering = Remembering(id)
    opens = [opening() for _ in range(MOST_REMEMBERED + 1)]
    assert [remembering(open_) for open_ in opens] == [id(open_) for open_ in opens]
    assert len(remembering._found) == 1
    assert remembering(opens[0]) == id(opens[0])


def test_it_keeps_what_it_remembers_from_being_mistaken() -> None:
    """An Open that is gone would leave its place in memory to another."""
    remembering = Remembering(lambda open_: open_.seed)
    for seed in range(100):
        assert remembering(open_session(0, prompt_length=1, max_length=9, num_token_ids=9, seed=seed)) == seed
