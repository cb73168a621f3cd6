"""Items that a connected service never answers: when they count as such, and where their sessions go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.errors import UnavailableError
from outrider.ports import EventBatch, Opened, Release, Score
from outrider.prefix_hash import EMPTY_PREFIX
from outrider_coordinator.requests.taken_answers import in_batch
from outrider_coordinator.routing import answer_watch, replica
from outrider_coordinator.routing.answer_watch import LOOK_INTERVAL_S, AnswerWatch
from outrider_coordinator.routing.dispatch import DispatchScheduler
from tests.coordinator.routing.fleet import Found, draft, eventually, fleet, num_held, own_tokens, target
from tests.coordinator.routing.test_dispatch import Link, extend, score, settle
from tests.coordinator.routing.test_replicas import LONG
from tests.support.scripted_ports import ScriptedLink

STEP_LIMIT_S = 30.0


class Watched:
    """A link, its watch, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.link = Link(DispatchScheduler())
        self.watch = AnswerWatch(lambda: self.now)

    def overdue_after(self, seconds: float, *, forward_limit_s: float = 0.0) -> bool:
        """True if any look within so many seconds found an item overdue."""
        found = False
        for _ in range(round(seconds / LOOK_INTERVAL_S)):
            self.now += LOOK_INTERVAL_S
            found = self.watch.overdue_s(self.link.link_queue, forward_limit_s) is not None or found
        return found


@pytest.fixture
async def watched() -> Watched:
    return Watched()


def prompt(session: int, num_tokens: int) -> Score:
    return Score(session, 1, 0, EMPTY_PREFIX, (5,) * num_tokens)


async def test_nothing_asked_is_nothing_overdue(watched: Watched) -> None:
    assert not watched.overdue_after(1000.0)


@pytest.mark.parametrize("item", [score(1), score(1, 2, 3), extend(1), prompt(1, 20)])
async def test_an_item_that_is_not_answered_is_overdue(watched: Watched, item: Any) -> None:
    watched.link.put(item)
    await settle()
    assert not watched.overdue_after(STEP_LIMIT_S - 1)
    assert watched.overdue_after(2.0)


async def test_one_that_others_are_answered_beside_is_overdue_too(watched: Watched) -> None:
    watched.link.put(score(1), score(2))
    await settle()
    watched.link.hear(2)
    for _ in range(10):
        watched.link.put(score(2))
        await settle()
        assert not watched.overdue_after(2.5)
        watched.link.hear(2)
    assert watched.overdue_after(STEP_LIMIT_S)


async def test_answers_and_ends_are_not_waited_for(watched: Watched) -> None:
    watched.link.put(score(1), extend(2), prompt(3, 500), prompt(4, 500))
    await settle()
    watched.link.hear(1, 3)
    watched.link.put(Release(2, 9), Release(4, 9))
    await settle()
    assert not watched.overdue_after(1000.0)


async def test_long_prompts_are_waited_for_longer(watched: Watched) -> None:
    watched.link.put(*(prompt(session, 8192) for session in range(4)))
    await settle()
    assert not watched.overdue_after(1200.0)
    watched.link.hear(0, 1, 2)
    assert watched.overdue_after(400.0)


async def test_slow_forwards_are_waited_for_longer(watched: Watched) -> None:
    watched.link.put(score(1))
    await settle()
    assert not watched.overdue_after(2000.0, forward_limit_s=700.0)
    assert watched.overdue_after(200.0, forward_limit_s=700.0)


async def test_the_coordinators_own_absence_does_not_count(watched: Watched) -> None:
    watched.link.put(score(1))
    await settle()
    assert not watched.overdue_after(1.0)
    watched.now += 3600.0
    assert not watched.overdue_after(10.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_watch, "DEFAULT_HANG_TIMEOUT_S", 0.2)
    monkeypatch.setattr(replica, "LOOK_INTERVAL_S", 0.02)


@pytest.mark.usefixtures("impatient")
async def test_a_target_that_answers_nothing_loses_its_sessions_to_another() -> None:
    expected = await own_tokens(LONG)
    silent, sound = target(), target()
    async with fleet(Found(silent, sound)) as made:
        await eventually(lambda: made.is_attached(2))
        streams = [made.stream(LONG) for _ in range(4)]
        for stream in streams:
            await stream.read(20)
        assert num_held(silent) and num_held(sound)
        silent.faults.hold = True
        results = await asyncio.gather(*(stream.finish() for stream in streams))
        assert [result.token_ids for result in results] == [expected] * 4
        hung = [each for each in made.coordinator.readings() if each.name == "outrider_replicas_hung_total"]
        assert [each.labels for each in hung if each.value] == [(("side", "target"),)]
        # It is given up again where it answers nothing, and then left alone.
        late = [made.stream(LONG) for _ in range(4)]
        for stream in late:
            assert (await stream.finish()).token_ids == expected
        silent.faults.hold = False
        silent.release_held()


@pytest.mark.usefixtures("impatient")
async def test_a_draft_that_answers_nothing_is_given_up() -> None:
    expected = await own_tokens(LONG)
    silent = draft()
    async with fleet(Found(target()), Found(silent), draft_timeout_ms=50) as made:
        await eventually(lambda: made.is_attached(1, 1))
        silent.faults.hold = True
        stream = made.stream(LONG)
        assert (await stream.finish()).token_ids == expected
        silent.faults.hold = False
        silent.release_held()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("in_arrays", [False, True])
async def test_the_only_target_is_tried_again_at_once(in_arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time, if it has answered since the time before; remote services answer in arrays."""
    events: Any = ScriptedLink.events

    async def arrays(self: Any) -> AsyncIterator[EventBatch[Any]]:
        async for batch in events(self):
            yield in_batch(batch)

    if in_arrays:
        monkeypatch.setattr(ScriptedLink, "events", arrays)
    expected = await own_tokens(LONG)
    only = target()
    async with fleet(Found(only)) as made:
        await eventually(lambda: made.is_attached(1))
        for num_hangs in (1, 2):
            stream = made.stream(LONG)
            await stream.read(20)
            only.faults.hold = True
            await eventually(lambda: made.coordinator.services.target.num_hangs == num_hangs)  # noqa: B023 - awaited
            assert not made.coordinator.services.target.known[0].absence_s
            only.faults.hold = False
            only.release_held()
            assert (await stream.finish()).token_ids == expected


@pytest.mark.usefixtures("impatient")
async def test_a_target_that_opens_sessions_and_answers_nothing_else_is_left_alone() -> None:
    only = target()
    async with fleet(Found(only)) as made:
        await eventually(lambda: made.is_attached(1))
        known = made.coordinator.services.target.known[0]
        only.faults.hold = True
        reading = asyncio.create_task(made.stream(LONG).read(1))
        await eventually(lambda: len(only.links) > 1 and bool(only.link.core.sessions))
        (request,) = made.coordinator.request_manager.running()
        only.link.push(Opened(request.session, request.loop.target.opened, 0))
        await eventually(lambda: known.num_hangs == 2)
        assert known.absence_s == replica.FIRST_ABSENCE_S
    with pytest.raises(UnavailableError):
        await reading
