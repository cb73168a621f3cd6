"""Sessions for which nothing comes, and links that open too many."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.ports import Open, Proposal, Refused, Release, SessionLost
from outrider.serving.engine_core import EngineCore
from outrider.serving.session import Limits, SessionLimits
from outrider.serving.session_registry import SessionRegistry
from outrider_draft.proposers.text.ngram import NgramProposer
from outrider_draft.proposers.text.text_executor import TextExecutor
from outrider_draft.texts import PlainSequences
from tests.support.core_driver import Driver, extend_item, open_session

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> int:
        return round(self.now * SECOND)


def drive(clock: Clock, *, max_per_link: int | None = None, idle_timeout_s: float | None = 60.0) -> Driver:
    limits = Limits(0, 1000, trims=True, sessions=SessionLimits(max_per_link, idle_timeout_s))
    proposer = TextExecutor(NgramProposer(min_n=1, max_n=2))
    core: EngineCore[Any, Any, Any, Any] = EngineCore(SessionRegistry(PlainSequences(), limits), proposer, clock=clock)
    return Driver(core)


def opened(session: int, generation: int = 1) -> Open:
    return open_session(session, prompt_length=2, max_length=100, num_token_ids=50, generation=generation)


def test_a_session_that_is_left_alone_ends_and_may_be_opened_again() -> None:
    clock = Clock()
    driver = drive(clock)
    driver.run(opened(1), opened(2))
    clock.now = 50
    assert isinstance(driver.one(extend_item(2, 2, [1, 2], 2)), Proposal)
    clock.now = 61
    assert driver.core.next_check_s == 0
    driver.core.end_idle_sessions()
    assert driver.core.num_sessions == 1
    lost = driver.one(extend_item(1, 2, [1, 2], 2))
    assert isinstance(lost, SessionLost) and (lost.session, lost.generation) == (1, 2)
    assert isinstance(driver.one(opened(1, 3), extend_item(1, 4, [1, 2], 2)), Proposal)
    assert isinstance(driver.one(extend_item(2, 3, [1, 2, 3], 2)), Proposal)


def test_a_session_that_waits_for_its_answer_is_not_idle() -> None:
    clock = Clock()
    driver = drive(clock)
    driver.run(opened(1))
    driver.send(extend_item(1, 2, [1, 2], 2))
    for now in (70.0, 140.0, 210.0):
        clock.now = now
        driver.core.end_idle_sessions()
    assert isinstance(driver.one(), Proposal)
    clock.now = 260
    driver.core.end_idle_sessions()
    assert driver.core.num_sessions == 1
    clock.now = 330
    driver.core.end_idle_sessions()
    assert driver.core.num_sessions == 0


def test_there_is_nothing_to_look_for_without_sessions_or_without_a_timeout() -> None:
    clock = Clock()
    driver = drive(clock)
    assert driver.core.next_check_s is None
    driver.run(opened(1))
    driver.core.end_idle_sessions()
    assert driver.core.next_check_s == 15
    driver.run(Release(1, 2))
    assert driver.core.next_check_s is None
    driver = drive(clock, idle_timeout_s=None)
    driver.run(opened(1))
    clock.now = 1e6
    driver.core.end_idle_sessions()
    assert driver.core.next_check_s is None
    assert driver.core.num_sessions == 1


def test_a_link_with_as_many_sessions_as_it_may_have_is_refused_more() -> None:
    driver = drive(Clock(), max_per_link=2)
    other = Driver(driver.core, link_id=1)
    driver.run(opened(1), opened(2))
    refused = driver.one(opened(3))
    assert isinstance(refused, Refused) and "2 sessions" in refused.reason
    assert driver.run(opened(2, generation=5)) == []  # opened anew: no more than before
    assert other.run(opened(3)) == []
    driver.run(Release(1, 2))
    assert driver.run(opened(4)) == []
    assert driver.core.num_sessions == 3


def test_many_items_for_sessions_that_are_not_open_are_answered_with_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = drive(Clock())
    lost = driver.run(*(extend_item(session, 1, [1], 2) for session in range(500)))
    assert [event.session for event in lost] == list(range(500))
    assert driver.core.stats.num_lost == 500
    assert 1 <= len(caplog.records) <= 32


def test_many_events_without_a_forward_do_not_hold_up_one() -> None:
    driver = drive(Clock())
    driver.run(opened(1))
    driver.send(extend_item(1, 2, [1, 2], 2))
    flood = [extend_item(session, 1, [1], 2) for session in range(2, 3000)]
    answered = []
    for _ in range(2):
        driver.core.handle(0, flood)
        answered.append([event for _, batch in driver.core.step() for event in batch.events])
    assert len(answered[0]) >= len(flood)
    assert any(isinstance(event, Proposal) for event in answered[1])
