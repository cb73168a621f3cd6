"""Each target has drafts of its own, as far as there are enough, and one on its device before all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.partners import partners_of
from tests.coordinator.routing.fleet import Fleet, Found, ask, draft, eventually, fleet, kill, num_held, target
from tests.support.scripted_ports import ToyDraft, ToyTarget
from tests.support.toy_models import ToyDraftCore

LONG_PROMPT = tuple(1 + number % 5 for number in range(64))


def replicas(*devices: str) -> Any:
    """Named by their number from the back, so that the order of attachment is not that of names."""
    return [replica(f"{9 - number}:1", device) for number, device in enumerate(devices)]


def replica(name: str, device: str = "", host: str = "") -> Any:
    description = SimpleNamespace(device_id=device, channel_host=host)
    return SimpleNamespace(name=name, description=description, is_up=True, is_listed=True)


def at(*places: str) -> Any:
    """Replicas at host/device, in the order of their names."""
    return [replica(f"{number}:1", place, place.partition("/")[0]) for number, place in enumerate(places)]


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


def test_a_lost_draft_keeps_its_place_and_its_target_takes_any() -> None:
    targets, drafts = replicas(*[""] * 4), replicas(*[""] * 4)
    drafts[1].is_up = False
    assert partners(targets, drafts) == [[0], [3, 2, 0], [2], [3]]
    drafts[1].is_up, drafts[3].is_up = True, False
    drafts[3].description = None  # never attached
    assert partners(targets, drafts) == [[0], [1], [2], [2, 1, 0]]


def test_a_lost_target_keeps_its_place() -> None:
    targets, drafts = replicas("", "", "third"), replicas("", "", "third")
    targets[1].is_up = targets[2].is_up = False
    assert partners(targets, drafts) == [[0], [1], [2]]


def test_a_target_whose_draft_is_lost_or_leaving_takes_those_of_no_other_device() -> None:
    targets, drafts = replicas("a", "b", ""), replicas("a", "b", "", "")
    drafts[0].is_up = False
    assert partners(targets, drafts) == [[3, 2], [1], [3, 2]]
    drafts[0].is_up, drafts[0].is_listed = True, False
    assert partners(targets, drafts) == [[3, 2], [1], [3, 2]]
    assert partners(targets[:2], drafts[:2]) == [[1], [1]]
    drafts[3].description.device_id = "a"
    assert partners(targets, drafts) == [[3], [1], [2]]


@pytest.mark.parametrize(
    ("targets", "drafts", "expected"),
    [
        (["h/0", "k/0"], ["k/1", "h/1"], [[1], [0]]),
        (["h/0", "h/1", "k/0"], ["k/1", "h/2", "h/3"], [[1], [2], [0]]),
        (["h/0", "h/1"], ["h/2", "h/0"], [[1], [0]]),  # the device comes first
        (["h/0", "h/1"], ["h/0", "k/0"], [[0], [1]]),  # what is on a device is not shared out
        (["h/0", "k/0"], ["h/1", "h/2"], [[0, 1], [0, 1]]),  # nothing is left for the other host
        (["h/0", "k/0", "l/0"], ["h/1", "m/0", "m/1"], [[0], [1], [2]]),
        (["h/0", "k/0"], ["h/0", "h/1"], [[0], [1]]),  # no target of the host needs it
        (["", "k/0"], ["m/0", ""], [[0], [1]]),  # an empty name is no host
    ],
)
def test_drafts_on_a_host_are_shared_out_among_its_targets(
    targets: list[str], drafts: list[str], expected: list[list[int]]
) -> None:
    assert partners(at(*targets), at(*drafts)) == expected


def test_lost_drafts_of_a_host_are_replaced_by_those_of_no_host() -> None:
    targets, drafts = at("h/0", "k/0"), at("h/1", "k/1", "m/0")
    drafts[0].is_up = False
    assert partners(targets, drafts) == [[2], [1]]


@pytest.mark.parametrize(
    ("targets", "drafts"),
    [
        (["h:9001", "h:9002"], ["h:9999", "h:10000"]),
        (["[::1]:9001", "[::1]:10000"], ["[::1]:5", "[::1]:6"]),
        (["g:2", "h:1"], ["g:10", "h:9"]),
        (["h:1", "unix:/run/target"], ["h:9", "unix:/run/draft"]),
        (["", "unix:/run/target"], ["", "h:9"]),
    ],
)
def test_names_are_in_order_of_host_and_number_of_port(targets: list[str], drafts: list[str]) -> None:
    found = partners([replica(name) for name in targets], [replica(name) for name in drafts])
    assert found == [[0], [1]]


def test_a_session_without_a_target_has_no_partners() -> None:
    assert partners_of(None, replicas("a"), replicas("a")) == []


def on(toy: Any, device: str) -> Any:
    toy.description = replace(toy.description, device_id=device)
    return toy


def running(made: Fleet) -> list[RequestState]:
    return list(made.coordinator.request_manager.running())


class Held:
    """Requests that run at once, since the targets hold their answers until the end."""

    def __init__(self, made: Fleet) -> None:
        self._made, self._tasks = made, list[asyncio.Task[Any]]()

    async def place(self, num_requests: int, **fields: Any) -> list[tuple[str, str]]:
        """Start requests; return (target, draft) of each, by number."""
        before = running(self._made)
        for seed in range(num_requests):
            self._tasks.append(asyncio.create_task(self._made.run(ask(seed=seed, **fields))))
        await eventually(lambda: sum(each.place.draft is not None for each in self._new(before)) == num_requests)
        places = [each.place for each in self._new(before)]
        return [(each.target.name[0], each.draft.name[0]) for each in places if each.target and each.draft]

    def _new(self, before: list[RequestState]) -> list[RequestState]:
        return [each for each in running(self._made) if each not in before]

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def held(made: Fleet, targets: list[ToyTarget]) -> AsyncIterator[Held]:
    for toy in targets:
        toy.faults.hold = True
    requests = Held(made)
    yield requests
    for toy in targets:
        toy.faults.hold = False
        toy.release_held()
    await requests.finish()


async def places(targets: list[ToyTarget], drafts: list[ToyDraft], num_requests: int, **fields: Any) -> Any:
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(len(targets), len(drafts)))
        async with held(made, targets) as requests:
            return await requests.place(num_requests, **fields)


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


async def test_sessions_keep_to_their_drafts_when_another_draft_is_lost_and_when_it_is_back() -> None:
    targets, drafts = [target() for _ in range(4)], [draft() for _ in range(4)]
    paired = {(str(number), str(number)) for number in range(4)}
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(4, 4))
        kill(drafts[1])
        await eventually(lambda: made.is_attached(4, 3))
        async with held(made, targets) as requests:
            found = set(await requests.place(8))
        assert {each for each in found if each[0] != "1"} == paired - {("1", "1")}
        drafts[1].faults.unreachable = False
        await eventually(lambda: made.is_attached(4, 4))
        async with held(made, targets) as requests:
            assert set(await requests.place(8)) == paired


async def test_a_target_keeps_to_its_draft_when_another_target_is_lost() -> None:
    targets, drafts = [target(), target()], [draft(), draft()]
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(2, 2))
        kill(targets[0])
        await eventually(lambda: made.is_attached(1, 2))
        async with held(made, targets) as requests:
            assert set(await requests.place(4)) == {("1", "1")}


async def test_a_target_whose_own_draft_leaves_does_not_use_those_of_other_devices() -> None:
    targets = [on(target(num_pages=4096), device) for device in ("first", "second", "third")]
    drafts = [on(draft(num_pages=4096), device) for device in ("first", "second", "fourth")]
    found = Found(*drafts)
    async with fleet(Found(*targets), found) as made:
        await eventually(lambda: made.is_attached(3, 3))
        async with held(made, targets) as requests:
            assert set(await requests.place(3)) == {("0", "0"), ("1", "1"), ("2", "2")}
            del found.listed["0:1"]
            await found.seen()
            assert made.is_attached(3, 3)
            assert set(await requests.place(9)) == {("0", "2"), ("1", "1"), ("2", "2")}


async def test_sessions_stay_on_their_device_when_the_draft_of_another_was_restarted() -> None:
    targets = [on(target(num_pages=4096), device) for device in ("first", "second")]
    drafts = [on(draft(num_pages=4096), device) for device in ("first", "second")]
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(2, 2))
        async with held(made, targets) as requests:
            await requests.place(16)
            kill(drafts[1])
            await eventually(lambda: made.is_attached(2, 1))
            drafts[1].faults.unreachable = False
            await eventually(lambda: made.is_attached(2, 2))
            assert set(await requests.place(4)) == {("0", "0"), ("1", "1")}
            assert num_held(drafts[0]) > 4 * num_held(drafts[1])


async def test_a_draft_on_the_device_that_refuses_sends_sessions_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyDraftCore, "retry_after_ms", 0)
    full, roomy = on(draft(), "first"), on(draft(num_pages=1000), "second")
    async with fleet(Found(on(target(), "first")), Found(full, roomy)) as made:
        await eventually(lambda: made.is_attached(1, 2))
        full.faults.refuse = 1_000_000
        assert (await made.run(ask(max_tokens=200))).speculation.num_draft_tokens > 0
        full.faults.refuse = 0
