"""A stranger on a link port who opens sessions and does nothing, beside users."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.ports import Open
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.types import JudgingRule, SamplingParams
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

MODEL = cached_tiny_model("qwen3", seed=1, max_position_embeddings=1024)
DEADLINE_S = 120.0
ASKED: dict[str, Any] = {"prompt_token_ids": [9, 2, 3], "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def opening(session: int) -> Open:
    greedy = SamplingParams(temperature=0.0)
    return Open(
        session=session,
        generation=0,
        sampling=greedy,
        seed=0,
        judging_rule=JudgingRule.GREEDY,
        prompt_length=1,
        max_length=512,
        num_token_ids=100,
    )


async def greedy(stack: Stack) -> tuple[int, ...]:
    return (await stack.generate(**ASKED)).token_ids


@pytest.mark.parametrize("side", ["target", "draft"])
async def test_sessions_that_nothing_comes_for_are_lost_and_users_are_served(side: str) -> None:
    limits = {"session_idle_timeout_s": 2.0, "num_pages": 64}
    async with run_stack(MODEL, MODEL, wire=True, target_settings=limits, draft_settings=limits) as stack:
        kind: Any = {"target": RemoteTarget, "draft": RemoteDraft}[side]
        link: Any = await kind(stack.addresses[side]).attach()
        link.send([opening(session) for session in range(100)])
        service: Any = getattr(stack, side)
        async with asyncio.timeout(DEADLINE_S):
            while not service.num_sessions:
                await asyncio.sleep(0.001)
            assert len(await greedy(stack)) == ASKED["max_tokens"]
            while service.num_sessions:
                await asyncio.sleep(0.01)
        assert stack.num_pages_used() == (0, 0)
        await link.close()


async def test_no_link_holds_more_sessions_than_it_may() -> None:
    limits = {"max_sessions_per_link": 3}
    async with run_stack(MODEL, wire=True, target_settings=limits) as stack:
        link = await RemoteTarget(stack.addresses["target"]).attach()
        link.send([opening(session) for session in range(10)])
        refused = 0
        async with asyncio.timeout(DEADLINE_S):
            async for batch in link.events():
                refused += len(batch.events)
                if refused == 7:
                    break
            assert stack.target.num_sessions == 3
            # More users than the coordinator's own link may have sessions take turns.
            results = await asyncio.gather(*(greedy(stack) for _ in range(8)))
        assert set(results) == {await greedy(stack)}
        await link.close()


async def test_a_coordinator_whose_sessions_are_lost_all_the_time_gives_the_same_tokens() -> None:
    async with run_stack(MODEL, MODEL, wire=True) as stack:
        expected = await greedy(stack)
    limits = {"session_idle_timeout_s": 0.0005}
    async with run_stack(MODEL, MODEL, wire=True, target_settings=limits, draft_settings=limits) as stack:
        async with asyncio.timeout(DEADLINE_S):
            results = await asyncio.gather(*(greedy(stack) for _ in range(4)))
        assert set(results) == {expected}
        lost = stack.target.stats.num_lost + (stack.draft.stats.num_lost if stack.draft else 0)
        assert lost > 0
