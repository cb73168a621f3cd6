"""Plain steps of one target go together; everything else passes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.convoy import Convoy
from outrider.ports import Release, Score, TargetCommand
from tests.coordinator.test_service import Stack, ask, eventually, stack


def plain(session: int, generation: int = 1) -> Score:
    return Score(session, generation, 8, 0, (1,))


def sessions(commands: Sequence[TargetCommand]) -> list[int]:
    return [command.session for command in commands]


@pytest.fixture
def sent() -> list[TargetCommand]:
    return []


@pytest.fixture
def convoy(sent: list[TargetCommand]) -> Convoy:
    return Convoy(sent.append)


def test_two_groups_become_one(convoy: Convoy, sent: list[TargetCommand]) -> None:
    convoy.send(plain(1))
    convoy.send(plain(2))
    assert not sent
    convoy.depart()
    assert sessions(sent) == [1, 2]
    convoy.send(plain(3))
    convoy.depart()
    assert sessions(sent) == [1, 2]
    for session in (1, 2):
        convoy.answered(session)
        convoy.send(plain(session, 2))
    convoy.depart()
    assert sessions(sent) == [1, 2, 3, 1, 2]


def test_prompts_and_drafts_pass_at_once(convoy: Convoy, sent: list[TargetCommand]) -> None:
    convoy.send(plain(1))
    convoy.depart()
    prompt, drafted = Score(2, 1, 0, 0, (1, 2)), Score(3, 1, 8, 0, (1,), (2, 3))
    for command in (prompt, drafted):
        convoy.send(command)
    assert sent[1:] == [prompt, drafted]
    convoy.answered(1)
    convoy.send(plain(1, 2))
    convoy.depart()
    assert sessions(sent)[3:] == [1], "it waits for plain steps alone"


def test_a_session_that_ends_is_not_waited_for(convoy: Convoy, sent: list[TargetCommand]) -> None:
    convoy.send(plain(1))
    convoy.depart()
    convoy.send(plain(2))
    convoy.depart()
    convoy.send(Release(1, 2))
    assert sessions(sent) == [1, 1, 2]


def test_what_is_held_of_a_session_that_ends_is_never_sent(convoy: Convoy, sent: list[TargetCommand]) -> None:
    convoy.send(plain(1))
    convoy.depart()
    convoy.send(plain(2))
    convoy.send(Release(2, 2))
    convoy.answered(1)
    convoy.depart()
    assert sent == [plain(1), Release(2, 2)]


async def test_requests_that_came_one_after_the_other_are_scored_together() -> None:
    async with stack(has_draft=False) as made:
        made.target.faults.hold = True
        first = asyncio.create_task(made.run(ask(seed=1)))
        await _sent(made, 1)  # its prompt
        made.target.release_held()
        await _sent(made, 2)  # its first plain step
        second = asyncio.create_task(made.run(ask(seed=2)))
        await _sent(made, 3)  # the other's prompt
        made.target.release_held()
        await _sent(made, 4)
        assert sessions(made.target.link.sent[3]) == [1], "the other is held"
        made.target.release_held()
        await _sent(made, 5)
        assert sorted(sessions(made.target.link.sent[4])) == [1, 2]
        made.target.faults.hold = False
        made.target.release_held()
        await asyncio.gather(first, second)


async def _sent(made: Stack, num_messages: int) -> None:
    await eventually(lambda: len(made.target.link.sent) >= num_messages)
