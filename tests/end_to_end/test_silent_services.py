"""Services in processes of their own, stopped, killed or cut off without a word: no stream fails, no token differs.

The services are toys, so that a process starts quickly; links, heartbeats and the coordinator are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from outrider.config import CoordinatorSettings
from outrider.generation import GenerationRequest
from outrider.types import SamplingParams
from outrider_coordinator.__main__ import _coordinator
from outrider_coordinator.service import Coordinator
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyTarget
from tests.support.tcp_proxy import Direction, TcpProxy
from tests.support.toy_process import ROWS, VOCAB_SIZE, toy_process

DEADLINE_S = 240.0
LINK_TIMEOUT_MS = 1000
LENGTH = 400
NUM_STREAMS = 3


@contextlib.asynccontextmanager
async def coordinator_of(targets: list[str], draft: str | None) -> AsyncIterator[Coordinator]:
    """Coordinator as ``outrider coordinator`` makes it; everything attached."""
    addresses = {"target_address": ",".join(targets), "draft_address": draft}
    settings = CoordinatorSettings.model_validate(
        {**addresses, "link_timeout_ms": LINK_TIMEOUT_MS, "draft_length": "fixed"}  # toys need not be worth asking
    )
    coordinator = _coordinator(settings, lambda is_up: None, None)
    async with asyncio.timeout(DEADLINE_S):
        await coordinator.start()
    try:
        await attached(coordinator, len(targets), 0 if draft is None else 1)
        yield coordinator
    finally:
        await coordinator.close()


async def attached(coordinator: Coordinator, num_targets: int, num_drafts: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (stats_of(coordinator).num_targets, stats_of(coordinator).num_drafts) != (num_targets, num_drafts):
            await asyncio.sleep(0.01)


class Streams:
    """Greedy requests being read, each of other tokens."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self._reading = [
            asyncio.create_task(self._read(coordinator, request, heard))
            for request, heard in zip(requests(), self.token_ids, strict=True)
        ]

    async def _read(self, coordinator: Coordinator, request: GenerationRequest, heard: list[int]) -> None:
        async for delta in coordinator.generate_stream(request):
            heard.extend(delta.token_ids)

    async def all_grow(self) -> None:
        """Return when each has more tokens than now."""
        lengths = [len(heard) for heard in self.token_ids]
        async with asyncio.timeout(DEADLINE_S):
            while any(len(heard) <= before for heard, before in zip(self.token_ids, lengths, strict=True)):
                assert not any(task.done() for task in self._reading), "a stream ended before the fault was over"
                await asyncio.sleep(0.001)

    async def finish(self) -> list[list[int]]:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._reading)
        return self.token_ids


def requests() -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0)
    return [
        GenerationRequest(prompt_token_ids=(1, 2, 3 + number), max_tokens=LENGTH, sampling=greedy)
        for number in range(NUM_STREAMS)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Output of the target alone."""

    async def run() -> list[list[int]]:
        coordinator = Coordinator(ToyTarget(ROWS, VOCAB_SIZE), None, CoordinatorSettings.model_validate({}))
        await coordinator.start()
        try:
            return await Streams(coordinator).finish()
        finally:
            await coordinator.close()

    return asyncio.run(run())


async def test_one_of_two_targets_is_stopped(expected: list[list[int]]) -> None:
    async with (
        toy_process("target") as first,
        toy_process("target") as second,
        toy_process("draft") as draft,
        coordinator_of([first.address, second.address], draft.address) as coordinator,
    ):
        streams = Streams(coordinator)
        await streams.all_grow()
        first.signal(signal.SIGSTOP)
        await attached(coordinator, 1, 1)
        assert await streams.finish() == expected
        first.signal(signal.SIGCONT)
        await attached(coordinator, 2, 1)


async def test_the_only_draft_is_stopped_and_continued(expected: list[list[int]]) -> None:
    async with (
        toy_process("target") as target,
        toy_process("draft") as draft,
        coordinator_of([target.address], draft.address) as coordinator,
    ):
        streams = Streams(coordinator)
        await streams.all_grow()
        draft.signal(signal.SIGSTOP)
        assert await streams.finish() == expected
        await attached(coordinator, 1, 0)
        draft.signal(signal.SIGCONT)
        await attached(coordinator, 1, 1)
        before = stats_of(coordinator).spec_stats.num_accepted_tokens
        assert await Streams(coordinator).finish() == expected
        assert stats_of(coordinator).spec_stats.num_accepted_tokens > before


async def test_the_only_target_is_killed_again_and_again(expected: list[list[int]]) -> None:
    """Each time as soon as every stream goes on."""
    async with contextlib.AsyncExitStack() as processes:
        target = await processes.enter_async_context(toy_process("target"))
        draft = await processes.enter_async_context(toy_process("draft"))
        async with coordinator_of([target.address], draft.address) as coordinator:
            streams = Streams(coordinator)
            for _ in range(3):
                await streams.all_grow()
                await target.kill()
                await attached(coordinator, 0, 1)
                target = await processes.enter_async_context(toy_process("target", port=target.port))
            assert await streams.finish() == expected
            assert stats_of(coordinator).num_failed == 0


@pytest.mark.parametrize(("fault", "direction"), [("stall", "down"), ("black_hole", "down"), ("black_hole", "up")])
async def test_one_of_two_targets_is_cut_off(expected: list[list[int]], fault: str, direction: Direction) -> None:
    async with (
        toy_process("target") as first,
        toy_process("target") as second,
        TcpProxy(first.port).running() as proxy,
        coordinator_of([proxy.address, second.address], None) as coordinator,
    ):
        streams = Streams(coordinator)
        await streams.all_grow()
        await getattr(proxy, fault)(direction)
        await attached(coordinator, 1, 0)
        await proxy.heal()
        await attached(coordinator, 2, 0)
        assert await streams.finish() == expected
