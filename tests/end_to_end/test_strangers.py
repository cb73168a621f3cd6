"""A stranger on a link port, who does nothing or sends messages out of order, beside users."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from outrider.ports import DraftCommand, Extend, Open, Release, Score, TargetCommand
from outrider.prefix_hash import prefix_hash
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.types import JudgingRule, SamplingParams
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

MODEL = cached_tiny_model("qwen3", seed=1, max_position_embeddings=1024)
DEADLINE_S = 240.0
Command = DraftCommand | TargetCommand
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
                refused += len(batch.all_events())
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


def asking(side: str, session: int, generation: int, text: tuple[int, ...]) -> Command:
    """Request for what follows a text, of which all but the last token were sent before."""
    begun = (session, generation, len(text) - 1, prefix_hash(text[:-1]), text[-1:])
    return Extend(*begun, 2) if side == "draft" else Score(*begun)


def script(side: str) -> list[Command]:
    """Honest commands of two sessions, in their order."""
    text = (5, 6, 7, 8)
    commands: list[Command] = []
    for session in (1, 2):
        asked = [asking(side, session, 1 + length, text[:length]) for length in range(1, 5)]
        commands += [opening(session), *asked, Release(session, 9)]
    return commands


def disordered(commands: list[Command]) -> dict[str, list[Command]]:
    """The commands as a network or a program that is broken would bring them."""
    shuffled = random.Random(5).sample(commands, len(commands))
    return {
        "doubled": [command for command in commands for _ in range(2)],
        "replayed": commands * 3,
        "reversed": commands[::-1],
        "shuffled": shuffled,
        "without opens": [command for command in commands if not isinstance(command, Open)],
    }


@pytest.mark.parametrize("side", ["target", "draft"])
async def test_doubled_reordered_and_replayed_messages_harm_nobody_else(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_stack(MODEL, MODEL, wire=True) as stack:
        expected = await greedy(stack)
        kind: Any = {"target": RemoteTarget, "draft": RemoteDraft}[side]
        users = [asyncio.create_task(greedy(stack)) for _ in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            for commands in disordered(script(side)).values():
                link: Any = await kind(stack.addresses[side]).attach()
                for command in commands:
                    link.send([command])
                link.send([opening(3), asking(side, 3, 2, (5,))])
                # Its answer comes when all that was sent before has been taken.
                async for batch in link.events():
                    if any(event.session == 3 and event.generation == 2 for event in batch.all_events()):
                        break
                await link.close()
            assert await asyncio.gather(*users) == [expected] * 4
            while stack.num_pages_used() != (0, 0):
                await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
