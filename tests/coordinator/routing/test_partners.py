"""Each target has drafts of its own, as far as there are enough, and one on its device before all others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.partners import partners_of
from tests.coordinator.routing.fleet import Fleet, Found, ask, draft, eventually, fleet, target
from tests.support.scripted_ports import ToyDraft, ToyTarget

LONG_PROMPT = tuple(1 + number % 5 for number in range(64))


def replicas(*devices: str) -> Any:
    """Named by their number from the back, so that the order of attachment is not that of names."""
    return [
        SimpleNamespace(name=f"{9 - number}:1", description=SimpleNamespace(device_id=device))
        for number, device in enumerate(devices)
    ]


def partners(targets: Any, drafts: Any) -> list[list[int]]:
    """Numbers of each target's drafts."""
    return [[drafts.index(draft) for draft in partners_of(each, targets, drafts)] for each in targets]


@pytest.mark.parametrize(
    ("num_targets", "num_drafts", "expected"),
    [
        (1, 1, [[0]]),
        (1, 3, [[2, 1, 0]]),
        (2, 1, [[0], [0]]),
        (2, 2, [[0], [1]]),
        (3, 2, [[1], [0], [1]]),
        (2, 5, [[3, 1], [4, 2, 0]]),
        (2, 0, [[], []]),
    ],
)
def test_without_devices_drafts_are_shared_out_by_name(
    num_targets: int, num_drafts: int, expected: list[list[int]]
) -> None:
    assert partners(replicas(*[""] * num_targets), replicas(*[""] * num_drafts)) == expected


def test_a_draft_on_a_targets_device_is_that_targets_and_the_others_are_shared_out() -> None:
    assert partners(replicas("a", "b"), replicas("b", "a")) == [[1], [0]]
    assert partners(replicas("a", "b"), replicas("c", "a")) == [[1], [0]]
    assert partners(replicas("a", "b", "c"), replicas("d", "b", "e")) == [[0], [1], [2]]
    assert partners(replicas("a", "b"), replicas("a")) == [[0], [0]]


def test_a_session_without_a_target_has_no_partners() -> None:
    assert partners_of(None, replicas("a"), replicas("a")) == []


def on(toy: Any, device: str) -> Any:
    toy.description = replace(toy.description, device_id=device)
    return toy


def running(made: Fleet) -> list[RequestState]:
    return list(made.coordinator._driver._request_manager.running())


async def places(targets: list[ToyTarget], drafts: list[ToyDraft], num_requests: int, **fields: Any) -> Any:
    """(target, draft) of requests that run at once, by number."""
    for toy in targets:
        toy.faults.hold = True
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(len(targets), len(drafts)))
        tasks = [asyncio.create_task(made.run(ask(seed=seed, **fields))) for seed in range(num_requests)]
        await eventually(lambda: sum(each.place.draft is not None for each in running(made)) == num_requests)
        found = [tuple(each.name[0] for each in (one.place.target, one.place.draft) if each) for one in running(made)]
        for toy in targets:
            toy.faults.hold = False
            toy.release_held()
        await asyncio.gather(*tasks)
    return found


async def test_sessions_of_a_target_draft_on_its_device_even_with_a_prompt_that_others_have() -> None:
    drafts = [on(draft(num_pages=4096), "second"), on(draft(num_pages=4096), "first")]
    targets = [on(target(num_pages=4096), "first"), on(target(num_pages=4096), "second")]
    found = await places(targets, drafts, 12, prompt_token_ids=LONG_PROMPT)
    assert {("0", "1"), ("1", "0")} == set(found)


async def test_sessions_of_two_targets_are_not_mixed_on_two_drafts() -> None:
    found = await places([target(), target()], [draft(), draft()], 8)
    assert sorted(found) == [("0", "0")] * 4 + [("1", "1")] * 4


async def test_all_drafts_serve_a_single_target() -> None:
    found = await places([target()], [draft(), draft()], 8)
    assert sorted(found) == [("0", "0")] * 4 + [("0", "1")] * 4
