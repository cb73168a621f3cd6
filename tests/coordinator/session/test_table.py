"""Session table: each session has a row of its own while it is in the table, and its values outside it too."""

from __future__ import annotations

import random

from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.table import SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import make_plan


def session(stop_token_ids: tuple[int, ...] = ()) -> SessionLoop:
    return SessionLoop(make_plan(vocab_size=20, prompt=(1, 2), stop_token_ids=stop_token_ids), DraftLengthPolicy(4))


def test_rows_are_taken_and_freed_in_any_order() -> None:
    chance, table = random.Random(1), SessionTable()
    inside: dict[int, tuple[SessionLoop, int]] = {}
    outside: list[tuple[SessionLoop, int]] = []
    for number in range(400):
        one, mark = session(), chance.randrange(1 << 40)
        table.enter(one, number)
        one.draft.held = mark
        inside[number] = one, mark
        while inside and chance.random() < 0.45:
            left, its_mark = inside.pop(chance.choice(list(inside)))
            table.leave(left)
            if chance.random() < 0.3:
                table.leave(left)  # once more does nothing
            outside.append((left, its_mark))
        if inside:  # one of before: its row may lie in arrays that have grown since
            changed, (other, _) = chance.choice(list(inside.items()))
            other.draft.held = mark + 1
            inside[changed] = other, mark + 1
        rows = table.indices(inside)
        assert len(set(rows)) == len(rows) and min(rows, default=0) >= 0
        assert [table.sessions[row] for row in rows] == [each for each, _ in inside.values()]
        assert table.values[rows, col.DRAFT_HELD].tolist() == [its_mark for _, its_mark in inside.values()]
    assert len(inside) > 20 and len(outside) > 100
    assert all(left.draft.held == its_mark for left, its_mark in outside)
    assert set(table.indices([number for number in range(400) if number not in inside])) == {-1}


def test_a_session_that_starts_again_is_known_by_its_new_number_alone() -> None:
    table, one = SessionTable(), session()
    table.enter(one, 7)
    table.enter(one, 9)
    assert table.indices([7, 9]) == [-1, one.row.index] and one.commands.session == 9
    table.leave(one)
    assert table.indices([9]) == [-1]


def test_ending_tokens_are_those_of_the_sessions_inside() -> None:
    table, both = SessionTable(), (session((5,)), session((5, 6)))
    for number, one in enumerate(both):
        table.enter(one, number)
    assert table.may_end([1, 6]) and not table.may_end([1, 2])
    table.leave(both[1])
    assert table.may_end([5]) and not table.may_end([6])
