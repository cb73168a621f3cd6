"""Preemption in a draft: the youngest session ends when pages run out, and the oldest goes on proposing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Preempted, Proposal, Refused
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.support.core_driver import Driver, extend_item, open_session

TEXT = [(7 * position) % 250 for position in range(80)]


def opened(session: int, *, arrival_ns: int, **changes: Any) -> Any:
    shape = {"prompt_length": 30, "max_length": 90, "num_token_ids": 257, "arrival_ns": arrival_ns}
    return open_session(session, **{**shape, **changes})


def make_driver(folder: Path, num_pages: int, **options: Any) -> Driver:
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=num_pages, **options)
    return Driver(build_model_core(ModelProposer(runner), max_batched_tokens=16))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_youngest_makes_room_for_the_oldest(folder: Path, prefix_caching: bool) -> None:
    driver = make_driver(folder, 20, prefix_caching=prefix_caching)
    driver.run(opened(0, arrival_ns=2), extend_item(0, 2, TEXT[:30], 0))
    driver.run(opened(1, arrival_ns=1), extend_item(1, 2, [9, *TEXT[:29]], 0))
    events = driver.run(extend_item(1, 3, [9, *TEXT[:55]], 6, num_kept_tokens=30))
    assert [type(event) for event in events] == [Preempted, Proposal]
    assert events[0].session == 0
    assert events[0].retry_after_ms > 0
    assert len(events[1].token_ids) == 6
    assert driver.core.stats.num_preempted == 1
    assert driver.run(extend_item(0, 4, TEXT[:31], 2, num_kept_tokens=30)) == []  # it crossed the event


def test_a_young_session_refused_for_lack_of_pages_finds_room_later(folder: Path) -> None:
    driver = make_driver(folder, 16)
    driver.run(opened(0, arrival_ns=1), extend_item(0, 2, TEXT[:40], 2))
    assert isinstance(driver.one(opened(1, arrival_ns=2), extend_item(1, 2, [9, *TEXT[:40]], 2)), Refused)
    driver.core.drop_link(0)
    again = driver.one(opened(1, arrival_ns=2, generation=3), extend_item(1, 4, [9, *TEXT[:40]], 2))
    assert isinstance(again, Proposal)
    assert len(again.token_ids) == 2


def test_a_session_longer_than_the_pool_is_kept_as_far_as_it_fits(folder: Path) -> None:
    driver = make_driver(folder, 10)
    proposal = driver.one(opened(0, arrival_ns=1), extend_item(0, 2, TEXT[:38], 8))
    assert isinstance(proposal, Proposal)
    assert len(proposal.token_ids) == 3  # the last drafted token needs no page
    outgrown = driver.one(extend_item(0, 3, TEXT[:41], 4, num_kept_tokens=38))
    assert outgrown == Proposal(0, 3, 41, ())


def test_proposals_after_a_preemption_are_the_same(folder: Path) -> None:
    roomy, tight = make_driver(folder, 256), make_driver(folder, 20)
    expected = roomy.one(opened(0, arrival_ns=2), extend_item(0, 2, TEXT[:50], 5))
    tight.run(opened(0, arrival_ns=2), extend_item(0, 2, TEXT[:50], 5))
    tight.run(opened(1, arrival_ns=1), extend_item(1, 2, [9, *TEXT[:49]], 5))
    tight.core.drop_link(0)
    again = tight.one(opened(0, arrival_ns=2, generation=5), extend_item(0, 6, TEXT[:50], 5))
    assert isinstance(again, Proposal)
    assert again.token_ids == expected.token_ids
