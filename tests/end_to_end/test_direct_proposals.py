"""Proposals that go from draft to target directly: they save time and never change a token, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.generation import GenerationResult
from outrider.ports import Scores
from outrider.proposal_channel import messages, receiver
from outrider.proposal_channel import sender as sending
from outrider.proposal_channel.receiver import ProposalReceiver
from outrider.serving.decode.expected import ExpectedStep
from outrider.transport.link.remote_link import RemoteLink
from tests.end_to_end.faults import around_forwards, break_links, outage
from tests.end_to_end.waiting import Reader, again_until, all_free, eventually
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("qwen3", seed=1, max_position_embeddings=1024)
DRAFT = cached_tiny_model("qwen3", seed=2, max_position_embeddings=1024)
PATIENT: dict[str, Any] = {"draft_timeout_ms": 60_000}
GREEDY: dict[str, Any] = {"temperature": 0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance_method": "coupled"}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "acceptance_method": "rejection"}
RULES = pytest.mark.parametrize("rule", [GREEDY, COUPLED, SAMPLED], ids=["greedy", "coupled", "rejection"])
NUM_USERS = 6


def requests(rule: dict[str, Any], *, max_tokens: int = 48) -> list[dict[str, Any]]:
    return [
        {
            "prompt_token_ids": [72, 101, 108, user],
            "max_tokens": max_tokens + user,
            "ignore_eos": True,
            "seed": user,
            **rule,
        }
        for user in range(NUM_USERS)
    ]


async def together(stack: Stack, rule: dict[str, Any], **options: Any) -> list[GenerationResult]:
    return list(await asyncio.gather(*[stack.generate(**request) for request in requests(rule, **options)]))


def num_direct(stack: Stack) -> float:
    assert stack.draft is not None
    value = next(each.value for each in stack.draft.readings() if each.name == "outrider_direct_proposals_total")
    assert isinstance(value, int | float)
    return value


_IN_TURN: dict[str, list[GenerationResult]] = {}


async def in_turn(rule: dict[str, Any], draft: Any = DRAFT) -> list[GenerationResult]:
    """Results without direct proposals, which are generated once for each rule and draft."""
    if (key := repr((rule, draft))) not in _IN_TURN:
        async with run_stack(TARGET, draft, wire=True, direct_proposals=False, **PATIENT) as stack:
            _IN_TURN[key] = await together(stack, rule)
            assert not num_direct(stack) and not stack.coordinator.services.peers.channels.num_open
    return _IN_TURN[key]


async def introduced(stack: Stack) -> None:
    await eventually(lambda: stack.coordinator.services.peers.channels.num_open == 1, "a proposal channel")


async def directly(stack: Stack, rule: dict[str, Any], expected: list[GenerationResult]) -> list[GenerationResult]:
    """The same requests until some proposals have gone directly: those that do are of sessions in step, which is a
    matter of time. Every time the tokens are the expected ones.
    """
    results: list[list[GenerationResult]] = []

    async def play() -> None:
        results.append(await together(stack, rule))
        check_same(results[-1], expected)

    await again_until(lambda: num_direct(stack) >= 5, play)
    assert num_direct(stack) >= 5
    return results[-1]


def check_same(results: list[GenerationResult], others: list[GenerationResult]) -> None:
    for result, other in zip(results, others, strict=True):
        assert result.token_ids == other.token_ids
        assert result.text == other.text


@RULES
@pytest.mark.parametrize("draft", [DRAFT, TARGET], ids=["other draft", "same model"])
async def test_tokens_are_the_same_with_and_without(draft: Any, rule: dict[str, Any]) -> None:
    expected = await in_turn(rule, draft)
    async with run_stack(TARGET, draft, wire=True, **PATIENT) as stack:
        await introduced(stack)
        found = await directly(stack, rule, expected)
        await all_free(stack)
    assert [each.speculation.num_draft_tokens for each in found] == [
        each.speculation.num_draft_tokens for each in expected
    ]


async def test_a_target_has_planned_steps_when_their_proposals_come(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = ExpectedStep.take

    def taking(self: ExpectedStep, *given: Any) -> Any:
        step = take(self, *given)
        taken.extend([] if step is None else [len(step)])
        return step

    expected = await in_turn(GREEDY)
    monkeypatch.setattr(ExpectedStep, "take", taking)
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        await again_until(lambda: len(taken) >= 5, lambda: directly(stack, GREEDY, expected))
        assert len(taken) >= 5
        await all_free(stack)


async def test_stop_texts_that_are_found_once_the_draft_was_asked_end_no_other_session() -> None:
    whole = await in_turn(GREEDY)
    stops = [result.text[9 + 3 * user :][:2] for user, result in enumerate(whole)]
    texts = [result.text[: result.text.index(stop)] for result, stop in zip(whole, stops, strict=True)]
    assert len({len(text) for text in texts}) > 1  # some sessions go on without others

    async def play() -> None:
        own = [{**request, "stop": (stop,)} for request, stop in zip(requests(GREEDY), stops, strict=True)]
        found = await asyncio.gather(*[stack.generate(**request) for request in own])
        assert [result.text for result in found] == texts
        for result, full in zip(found, whole, strict=True):
            assert result.token_ids == full.token_ids[: len(result.token_ids)]

    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        await again_until(lambda: num_direct(stack) >= 5, play)
        assert num_direct(stack) >= 5
        check_same(await together(stack, GREEDY), whole)
        await all_free(stack)


@RULES
async def test_scores_that_overtake_their_proposals_are_not_computed_twice(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await in_turn(rule)
    events, have_scores, num_overtaken = RemoteLink.events, asyncio.Event(), 0

    async def late(self: Any) -> AsyncIterator[Any]:
        """Messages of a link, direct proposals after the next scores."""
        nonlocal num_overtaken
        async for batch in events(self):
            if any(answers.channel for answers in batch.batched):
                have_scores.clear()
                with contextlib.suppress(TimeoutError):  # where the target does not score them yet
                    await asyncio.wait_for(have_scores.wait(), 0.2)
                    num_overtaken += 1
            yield batch
            if any(isinstance(event, Scores) for event in batch.all_events()):
                have_scores.set()

    monkeypatch.setattr(RemoteLink, "events", late)
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        num_rows: list[int] = []
        found: list[GenerationResult] = []

        async def play() -> None:
            results = await together(stack, rule)
            check_same(results, expected)
            found.extend(results)

        with around_forwards(stack.target.runner, lambda rows: num_rows.append(len(rows))):
            await again_until(lambda: num_overtaken >= 3, play)
        await all_free(stack)
    assert num_overtaken >= 3
    assert sum(num_rows) == sum(result.speculation.num_steps for result in found)


@pytest.mark.parametrize("side", ["draft", "target"])
async def test_a_channel_that_breaks_changes_no_token(side: str) -> None:
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        expected = await together(stack, {**GREEDY, "num_speculative_tokens": 0}, max_tokens=200)
        service: Any = stack.draft if side == "draft" else stack.target
        running = asyncio.ensure_future(together(stack, GREEDY, max_tokens=200))
        before = num_direct(stack)
        for breaks in range(3):
            before = num_direct(stack)
            await eventually(lambda: num_direct(stack) > before + 2 or running.done(), "steps")  # noqa: B023 - awaited
            if running.done():
                break
            service.thread.note_read()
            await asyncio.to_thread(service.channels.close)
            assert breaks < 3
        check_same(await running, expected)
        await introduced(stack)  # again
        before = num_direct(stack)

        async def play() -> None:
            check_same(await together(stack, GREEDY, max_tokens=200), expected)

        await again_until(lambda: num_direct(stack) > before, play)
        assert num_direct(stack) > before
        await all_free(stack)


async def test_a_draft_that_dies_changes_no_token() -> None:
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        expected = await together(stack, {**GREEDY, "num_speculative_tokens": 0}, max_tokens=150)
        running = asyncio.ensure_future(together(stack, GREEDY, max_tokens=150))
        await eventually(lambda: num_direct(stack) > 2, "steps")
        async with outage(stack, "draft"):
            await asyncio.sleep(0.05)
        check_same(await running, expected)
        await all_free(stack)


@pytest.mark.parametrize("side", ["draft", "target"])
async def test_a_service_whose_links_break_gets_its_sessions_again(side: str) -> None:
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        expected = await together(stack, {**GREEDY, "num_speculative_tokens": 0}, max_tokens=100)
        running = asyncio.ensure_future(together(stack, GREEDY, max_tokens=100))
        await eventually(lambda: num_direct(stack) > 2, "steps")
        break_links(stack.target if side == "target" else stack.draft)
        check_same(await running, expected)
        await all_free(stack)


async def test_a_channel_that_brings_other_tokens_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = messages.to_bytes

    def lying(answers: Any) -> bytes:
        return honest(replace(answers, token_ids=(answers.token_ids + 1) % 200))

    monkeypatch.setattr(sending, "to_bytes", lying)
    async with run_stack(TARGET, TARGET, wire=True, **PATIENT) as stack:
        await introduced(stack)
        expected = await together(stack, {**GREEDY, "num_speculative_tokens": 0})
        found = await directly(stack, GREEDY, expected)
        assert stack.coordinator.request_manager.spec_stats().num_bad_evidence >= 1
        # Every draft token is right, so all are accepted, though the target scored others first.
        assert all(each.speculation.mean_acceptance_length > 4 for each in found)


@RULES
async def test_scores_may_come_before_the_proposals(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await in_turn(rule)
    events = RemoteLink.events
    held: list[int] = []

    async def late(link: Any) -> AsyncIterator[Any]:
        async for batch in events(link):
            if any(batched.channel for batched in batch.batched):
                held.append(1)
                await asyncio.sleep(0.05)
            yield batch

    monkeypatch.setattr(RemoteLink, "events", late)
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        await again_until(lambda: len(held) >= 5, lambda: directly(stack, rule, expected))
        assert len(held) >= 5
        await all_free(stack)


async def test_late_proposals_do_not_hold_a_step() -> None:
    async with run_stack(TARGET, DRAFT, wire=True, draft_timeout_ms=5) as stack:
        await introduced(stack)
        expected = await together(stack, {**GREEDY, "num_speculative_tokens": 0})
        check_same(await together(stack, GREEDY), expected)
        await all_free(stack)


@pytest.mark.parametrize("fault", ["ids", "support"])
async def test_a_draft_that_is_wrong_by_either_way_ends_no_request(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = messages.to_bytes

    def wrong(answers: Any) -> bytes:
        if fault == "ids":
            return honest(replace(answers, token_ids=answers.token_ids + 100_000))
        supports = answers.supports
        return honest(replace(answers, supports=replace(supports, token_ids=supports.token_ids + 100_000)))

    rule = GREEDY if fault == "ids" else SAMPLED
    expected = await in_turn(rule)
    monkeypatch.setattr(sending, "to_bytes", wrong)
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        await directly(stack, rule, expected)
        # The coordinator counts no loss of which it hears before it has the proposals: then nothing was asked for yet.
        assert "a session is lost" in caplog.text
        await all_free(stack)


async def test_a_user_who_leaves_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_target.service.ProposalReceiver", partial(ProposalReceiver, patience_s=0.2))
    # Of the time that this process computes: other processes may hold up a draft for longer.
    monkeypatch.setattr(receiver, "time", SimpleNamespace(monotonic=time.process_time))
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        await introduced(stack)
        expected = await together(stack, {**GREEDY, "num_speculative_tokens": 0}, max_tokens=150)
        for _ in range(3):
            leaving = Reader(stack, **{**requests(GREEDY)[0], "max_tokens": 600})
            running = asyncio.ensure_future(together(stack, GREEDY, max_tokens=150))
            await leaving.read(20)
            await leaving.close()
            check_same(await running, expected)
        stats = stack.coordinator.request_manager.spec_stats()
        assert not stats.num_target_losses and not stats.num_target_rebuilds
        await all_free(stack)
