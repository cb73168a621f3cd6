"""Dispatch: one command at a time on a shared device, and plain steps that wait for those in flight."""

from __future__ import annotations

import asyncio

import pytest

from outrider.ports import Extend, Proposal, Release, Score
from outrider.prefix_hash import EMPTY_PREFIX
from outrider_coordinator.routing import dispatch as dispatch_module
from outrider_coordinator.routing.dispatch import DispatchScheduler, LinkQueue, SessionItem

LONG = 30.0


def extend(session: int, draft_length: int = 4) -> Extend:
    return Extend(session, 1, 7, EMPTY_PREFIX, (5,), draft_length)


def score(session: int, *draft_token_ids: int, num_kept_tokens: int = 7) -> Score:
    return Score(session, 1, num_kept_tokens, EMPTY_PREFIX, (5,), draft_token_ids)


def answer(session: int) -> Proposal:
    """Answer to a session; the kind of event makes no difference."""
    return Proposal(session, 1, 8, ())


class Link:
    """Messages of one link, in order."""

    def __init__(self, dispatch: DispatchScheduler, device_id: str = "") -> None:
        self.messages: list[list[int]] = []
        self._outbox: list[SessionItem] = []
        self.link_queue: LinkQueue = dispatch.link_queue(self._send_all)
        self.link_queue.device_id = device_id

    def put(self, *commands: SessionItem) -> None:
        for command in commands:
            self._outbox.append(command)
            self.link_queue.put(command)

    def hear(self, *sessions: int) -> None:
        self.link_queue.note_answers([answer(session) for session in sessions])

    def _send_all(self) -> None:
        commands, self._outbox = self._outbox, []
        self.link_queue.note_sent(commands)
        self.messages.append([command.session for command in commands])


@pytest.fixture(autouse=True)
def no_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent because it took too long, unless a test says so."""
    monkeypatch.setattr(dispatch_module, "LONGEST_WAIT_S", LONG)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_waits_at_the_end_of_a_turn_is_one_message() -> None:
    link = Link(DispatchScheduler())
    link.put(extend(1), extend(2))
    assert link.messages == []
    link.put(extend(3))
    await settle()
    assert link.messages == [[1, 2, 3]]


async def test_what_follows_from_a_message_of_one_pair_is_sent_as_soon_as_it_was_heard() -> None:
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch), Link(dispatch)
    dispatch.begin_message()
    target.hear(1, 2)
    draft.put(extend(1), extend(2))
    await settle()
    assert draft.messages == []
    dispatch.end_message()
    assert (target.messages, draft.messages) == ([], [[1, 2]])
    await settle()
    assert draft.messages == [[1, 2]]


async def test_messages_of_several_targets_in_one_turn_are_followed_by_one_message_to_their_draft() -> None:
    dispatch = DispatchScheduler()
    first, second, draft = Link(dispatch), Link(dispatch), Link(dispatch)
    for session, target in enumerate((first, second), start=1):
        dispatch.begin_message()
        target.hear(session)
        draft.put(extend(session))
        dispatch.end_message()
    assert draft.messages == []
    await settle()
    assert draft.messages == [[1, 2]]


async def test_drafts_and_scores_of_one_device_take_turns_and_sessions_come_into_step() -> None:
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch, "gpu"), Link(dispatch, "gpu")
    target.put(score(1, 4, 4))
    draft.put(extend(2))
    await settle()
    assert (target.messages, draft.messages) == ([[1]], [])
    target.hear(1)
    draft.put(extend(1))
    await settle()
    assert draft.messages == [[2, 1]]
    draft.hear(2)
    target.put(score(2, 4))
    await settle()
    assert target.messages == [[1]]
    draft.hear(1)
    target.put(score(1, 4))
    await settle()
    assert target.messages == [[1], [2, 1]]


async def test_who_has_waited_longest_goes_first() -> None:
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch, "gpu"), Link(dispatch, "gpu")
    target.put(score(1))
    await settle()
    draft.put(extend(2))
    await settle()
    target.hear(1)
    target.put(score(1))
    await settle()
    assert (target.messages, draft.messages) == ([[1]], [[2]])
    draft.hear(2)
    target.put(score(2, 4))
    await settle()
    assert target.messages == [[1], [1, 2]]


async def test_services_on_devices_of_their_own_do_not_wait_for_each_other() -> None:
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch, "gpu 0"), Link(dispatch, "gpu 1")
    target.put(score(1, 4))
    await settle()
    draft.put(extend(2))
    target.put(score(3, 4))
    await settle()
    assert (target.messages, draft.messages) == ([[1], [3]], [[2]])


async def test_plain_steps_wait_for_plain_steps_wherever_they_are() -> None:
    link = Link(DispatchScheduler())
    link.put(score(1))
    await settle()
    link.put(score(2))
    await settle()
    assert link.messages == [[1]]
    link.hear(1)
    link.put(score(1))
    await settle()
    assert link.messages == [[1], [2, 1]]


async def test_prompts_and_ends_wait_for_nobody_and_are_waited_for_by_nobody() -> None:
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch, "gpu"), Link(dispatch, "gpu")
    target.put(score(1, num_kept_tokens=0))
    await settle()
    draft.put(extend(2))
    await settle()
    target.put(score(3, num_kept_tokens=0))
    await settle()
    target.put(Release(1, 2))
    await settle()
    assert (target.messages, draft.messages) == ([[1], [3], [1]], [[2]])


async def test_a_session_that_was_released_and_a_link_that_was_lost_keep_nobody_waiting() -> None:
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch, "gpu"), Link(dispatch, "gpu")
    target.put(score(1))
    await settle()
    draft.put(extend(2))
    target.put(Release(1, 2))
    await settle()
    assert draft.messages == [[2]]
    target.put(score(3))
    await settle()
    assert target.messages == [[1], [1]]
    draft.link_queue.clear()
    await settle()
    assert target.messages == [[1], [1], [3]]


async def test_who_does_not_answer_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "LONGEST_WAIT_S", 0.01)
    dispatch = DispatchScheduler()
    target, draft = Link(dispatch, "gpu"), Link(dispatch, "gpu")
    draft.put(extend(1))
    await settle()
    target.put(score(1))
    async with asyncio.timeout(LONG):
        while not target.messages:
            await asyncio.sleep(0.001)
    assert target.messages == [[1]]
