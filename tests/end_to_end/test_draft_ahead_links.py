"""Drafting ahead over a channel that delays, reorders, stalls and breaks: tokens stay those of the target alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch
from outrider.generation import GenerationResult
from outrider.proposal_channel import messages
from outrider.proposal_channel import receiver as receiving
from outrider.proposal_channel import sender as sending
from outrider.proposal_channel import verdicts as verdict_messages
from outrider.proposal_channel.receiver import ProposalReceiver
from outrider.proposal_channel.verdicts import Verdicts
from outrider.transport import channel_streams
from outrider.transport.channels import keepalive
from outrider.transport.remote import RemoteTarget
from outrider.types import PeerAddress
from tests.end_to_end.test_direct_proposals import (
    COUPLED,
    GREEDY,
    PATIENT,
    TARGET,
    check_same,
    introduced,
    num_direct,
    together,
)
from tests.end_to_end.test_draft_ahead import MODES, alone, check_played, expected_of, steps
from tests.end_to_end.waiting import DEADLINE_S, again_until, all_free, eventually
from tests.support.stack import Stack, run_stack
from tests.support.tcp_proxy import Direction, TcpProxy


@contextlib.asynccontextmanager
async def behind_proxy(monkeypatch: pytest.MonkeyPatch, draft_ahead: str) -> AsyncIterator[tuple[Stack, TcpProxy]]:
    """A stack whose draft is on another host, with a proxy in its way to the target."""
    monkeypatch.setattr("outrider_draft.service.channel_host", lambda: "another host")
    between: dict[str, Any] = {"channels_between_hosts": True, "draft_ahead": draft_ahead, **PATIENT}
    async with TcpProxy().running() as proxy:

        def through(target: RemoteTarget) -> PeerAddress:
            proxy.server_port = int(target.address.rpartition(":")[2])
            return PeerAddress(proxy.address)

        monkeypatch.setattr(RemoteTarget, "peer_address", property(through))
        async with run_stack(TARGET, TARGET, wire=True, **between) as stack:
            await introduced(stack)
            assert proxy.num_accepted
            yield stack, proxy


@MODES
async def test_random_delays_change_no_token(draft_ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, chance = await expected_of(COUPLED), random.Random(7)
    async with behind_proxy(monkeypatch, draft_ahead) as (stack, proxy):
        proxy.delay_s = lambda: chance.choice((0.0, 0.0, 0.001, 0.004, 0.015))
        await check_played(stack, COUPLED, expected)


@MODES
async def test_a_channel_that_is_cut_and_stalls_changes_no_token(
    draft_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await expected_of(GREEDY)
    async with behind_proxy(monkeypatch, draft_ahead) as (stack, proxy):
        for fault in (proxy.stall("down"), proxy.stall("up"), proxy.stall()):
            before = num_direct(stack)
            running = asyncio.ensure_future(together(stack, GREEDY))
            await eventually(lambda: num_direct(stack) > before or running.done(), "steps")  # noqa: B023 - awaited
            await fault
            await eventually(lambda: proxy.num_accepted > 0, "a connection")
            proxy.cut()
            await proxy.heal()
            check_same(await running, expected)
            await introduced(stack)  # again
        before = steps(stack, "used")
        await again_until(lambda: steps(stack, "used") > before, lambda: alone(stack, GREEDY))
        assert steps(stack, "used") > before
        await all_free(stack)


async def forwards_of(stack: Stack, expected: list[GenerationResult]) -> tuple[list[int], int]:
    """Forwards of target and draft that the same requests take, one after the other, and the steps of all of them."""
    assert stack.draft is not None
    runners = stack.target.runner, stack.draft.runner
    before = [0 if runner is None else runner.num_forwards for runner in runners]
    results = await alone(stack, COUPLED)
    check_same(results, expected[: len(results)])
    await all_free(stack)
    taken = [0 if runner is None else runner.num_forwards - had for runner, had in zip(runners, before, strict=True)]
    return taken, sum(result.speculation.num_steps for result in results)


@MODES
async def test_without_a_channel_draft_and_target_take_turns(draft_ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cliff: each step takes the forwards that it takes where nothing goes directly or ahead, and none is lost."""
    expected = await expected_of(COUPLED)
    async with run_stack(TARGET, TARGET, wire=True, direct_proposals=False, draft_ahead="in_turn", **PATIENT) as stack:
        in_turn = await forwards_of(stack, expected)
    async with behind_proxy(monkeypatch, draft_ahead) as (stack, proxy):
        proxy.refuses = True
        proxy.cut()
        channels = stack.coordinator.services.peers.channels
        await eventually(lambda: not channels.num_open, "the end of the channel")
        assert await forwards_of(stack, expected) == in_turn
        assert steps(stack, "used") == steps(stack, "unused") == 0
        proxy.refuses = False
        await introduced(stack)  # again, by itself
        await again_until(lambda: steps(stack, "used") > 0, lambda: alone(stack, COUPLED))
        assert steps(stack, "used")


@MODES
@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_path_that_swallows_everything_holds_no_step_for_long(
    draft_ahead: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keepalive of the channel ends it, long before scores that wait for proposals are given up."""
    expected = await expected_of(GREEDY)
    monkeypatch.setattr(channel_streams, "PATH_KEEPALIVE", keepalive(200, 2_000))
    monkeypatch.setattr("outrider_target.service.ProposalReceiver", partial(ProposalReceiver, patience_s=600.0))
    async with behind_proxy(monkeypatch, draft_ahead) as (stack, proxy):
        before = num_direct(stack)
        running = asyncio.ensure_future(together(stack, GREEDY))
        await eventually(lambda: num_direct(stack) > before or running.done(), "steps")
        await proxy.black_hole(direction)
        check_same(await asyncio.wait_for(running, DEADLINE_S), expected)
        check_same(await asyncio.wait_for(together(stack, GREEDY), DEADLINE_S), expected)
        await all_free(stack)


def of_single_sessions(verdicts: Verdicts) -> list[Verdicts]:
    batched = [getattr(verdicts, name) for name in Verdicts.__slots__]
    return [Verdicts(*[column[row : row + 1] for column in batched]) for row in range(len(verdicts))]


class Reordering:
    """Sends verdicts session by session in any order, some of them after later ones, some twice."""

    def __init__(self, seed: int) -> None:
        self._chance, self._held = random.Random(seed), list[Verdicts]()

    def __call__(self, verdicts: Verdicts) -> bytes:
        waiting = [*self._held, *of_single_sessions(verdicts)]
        self._chance.shuffle(waiting)
        num_held = self._chance.randrange(len(waiting))
        self._held, leaving = waiting[:num_held][:8], waiting[num_held:]
        leaving += [each for each in leaving if self._chance.random() < 0.2]
        return b"".join([verdict_messages.to_bytes(each) for each in leaving])


@MODES
async def test_verdicts_in_another_order_change_no_token(draft_ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await expected_of(GREEDY)
    monkeypatch.setattr(receiving, "to_bytes", Reordering(5))
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        await check_played(stack, GREEDY, expected)


Push = Callable[[random.Random, AnswerBatch[Any]], AnswerBatch[Any] | None]


def lost(_chance: random.Random, _proposals: AnswerBatch[Any]) -> None:
    """Message that never arrives."""


def other_tokens(chance: random.Random, proposals: AnswerBatch[Any]) -> AnswerBatch[Any]:
    shift = np.uint32(chance.randrange(1, 100))
    return replace(proposals, token_ids=((proposals.token_ids + shift) % 200).astype(proposals.token_ids.dtype))


def of_another_step(chance: random.Random, proposals: AnswerBatch[Any]) -> AnswerBatch[Any]:
    return replace(proposals, generations=proposals.generations + np.uint64(chance.choice((1, 2, 40))))


def of_other_sessions(_chance: random.Random, proposals: AnswerBatch[Any]) -> AnswerBatch[Any]:
    return replace(proposals, sessions=proposals.sessions[::-1].copy())


PUSHES: tuple[Push, ...] = (lost, other_tokens, of_another_step, of_other_sessions)


@MODES
async def test_proposals_that_go_wrong_on_their_way_change_no_token(
    draft_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, chance, honest = await expected_of(GREEDY), random.Random(11), messages.to_bytes

    def sent(proposals: AnswerBatch[Any]) -> bytes:
        changed = chance.choice(PUSHES)(chance, proposals) if chance.random() < 0.2 else proposals
        return b"" if changed is None else honest(changed)

    monkeypatch.setattr(sending, "to_bytes", sent)
    monkeypatch.setattr("outrider_target.service.ProposalReceiver", partial(ProposalReceiver, patience_s=0.2))
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        await introduced(stack)
        await check_played(stack, GREEDY, expected)


@pytest.mark.parametrize(("rule", "draft_ahead"), [(GREEDY, "verdict"), (COUPLED, "verdict"), (COUPLED, "chain")])
async def test_choices_of_one_prompt_are_those_of_the_target_alone(rule: dict[str, Any], draft_ahead: str) -> None:
    asked: dict[str, Any] = {"prompt_token_ids": [72, 101, 108, 9], "max_tokens": 40, "ignore_eos": True, "seed": 3}

    async def choices(stack: Stack) -> list[Any]:
        assert stack.client is not None
        return list(await stack.client.generate(n=4, **asked, **rule))

    async with run_stack(TARGET, None, wire=True) as stack:
        expected = await choices(stack)
    assert (len({each.token_ids for each in expected}) > 1) == (rule is not GREEDY)
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        await introduced(stack)

        async def play() -> None:
            check_same(await choices(stack), expected)

        await again_until(lambda: steps(stack, "used") > 10, play)
        assert steps(stack, "used") > 10
        await all_free(stack)
