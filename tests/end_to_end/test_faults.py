"""Faults of either service, in the middle of streams: users see the same tokens, or one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.errors import CapacityError, InvalidRequestError, NonFiniteLogitsError, UnavailableError
from outrider.generation import GenerationResult
from outrider.ports import Extend, Open, Proposal, Score, Scores
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.types import JudgingRule, SamplingParams
from tests.end_to_end.faults import break_links, gate_of, lose_sessions, outage, poisoned
from tests.end_to_end.waiting import DEADLINE_S, Reader, all_free, eventually
from tests.support.coordinator_stats import stats_of
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("qwen3", seed=1, max_position_embeddings=1024)
DRAFT = TARGET
PROMPT = [72, 101, 108, 108, 111]
PATIENT: dict[str, Any] = {"draft_timeout_ms": 60_000}
GREEDY: dict[str, Any] = {"prompt_token_ids": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
COUPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "acceptance_method": "coupled", "seed": 11}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "acceptance_method": "rejection", "seed": 11}
WIRE = pytest.mark.parametrize("wire", [False, True], ids=["in process", "over grpc"])
EXACT = pytest.mark.parametrize("options", [GREEDY, COUPLED], ids=["greedy", "coupled"])


async def alone(stack: Stack, options: dict[str, Any]) -> GenerationResult:
    """The same request without any speculation."""
    return await stack.generate(**{**options, "num_speculative_tokens": 0})


def check_same(reader: Reader, expected: GenerationResult) -> GenerationResult:
    """Every token came once, in order, and with it the text."""
    result = reader.deltas[-1].result
    assert result is not None
    assert reader.token_ids == result.token_ids == expected.token_ids
    assert reader.text == result.text == expected.text
    return result


def is_draft_up(stack: Stack) -> bool:
    draft = stack.coordinator.services.draft
    return draft is not None and draft.is_up


# The draft.


@EXACT
async def test_a_draft_server_that_stops_and_is_back_changes_no_token(options: dict[str, Any]) -> None:
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        expected = await alone(stack, options)
        with gate_of(stack.target.runner) as gate:
            reader = Reader(stack, **options)
            await reader.read(10)
            await gate.shut()
            async with outage(stack, "draft"):
                await eventually(lambda: not is_draft_up(stack))
                gate.open()
                await reader.read(30)
            await reader.finish()
        result = check_same(reader, expected)
        # Up to the outage a proposal of 4 in every step; some steps afterwards without.
        assert 4 <= result.speculation.num_draft_tokens < 4 * (result.speculation.num_steps - 5)
        await eventually(lambda: is_draft_up(stack))
        again = await stack.generate(**options)
        assert again.token_ids == expected.token_ids
        assert again.speculation.num_draft_tokens >= 40
        await all_free(stack)


async def test_a_running_stream_takes_the_draft_back() -> None:
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        expected = await alone(stack, GREEDY)
        with gate_of(stack.target.runner) as gate:
            async with outage(stack, "draft"):
                await eventually(lambda: not is_draft_up(stack))
                reader = Reader(stack, **GREEDY)
                await reader.read(5)
                await gate.shut()
            await eventually(lambda: is_draft_up(stack))
            gate.open()
            await reader.finish()
        result = check_same(reader, expected)
        assert 4 <= result.speculation.num_draft_tokens <= 4 * (result.speculation.num_steps - 5)
        await all_free(stack)


@WIRE
async def test_a_slow_draft_is_gone_without_and_taken_back(wire: bool) -> None:
    long = {**GREEDY, "max_tokens": 300}
    async with run_stack(TARGET, DRAFT, wire=wire, draft_timeout_ms=1000) as stack:
        expected = await alone(stack, long)
        with gate_of(stack.draft.runner) as draft_gate, gate_of(stack.target.runner) as target_gate:  # type: ignore[union-attr]
            reader = Reader(stack, **long)
            await reader.read(1)
            await draft_gate.shut()
            await reader.read(30)
            assert stack.draft.num_sessions == 1  # type: ignore[union-attr]  # it is late, and still has the session
            await target_gate.shut()
            forwards = stack.draft.runner.num_forwards  # type: ignore[union-attr]
            draft_gate.open()
            await eventually(lambda: stack.draft.runner.num_forwards > forwards)  # type: ignore[union-attr]
            target_gate.open()
            await reader.finish()
        result = check_same(reader, expected)
        assert 8 <= result.speculation.num_draft_tokens <= 4 * (result.speculation.num_steps - 10)
        assert stats_of(stack.coordinator).spec_stats.num_draft_timeouts >= 1
        await all_free(stack)


async def test_a_draft_without_room_costs_speed_alone_and_is_asked_again() -> None:
    long = {**GREEDY, "max_tokens": 500}
    async with run_stack(TARGET, DRAFT, wire=False, draft_settings={"num_pages": 64}, **PATIENT) as stack:
        expected = await alone(stack, long)
        async with occupied(stack.draft, num_tokens=1024):
            short = await stack.generate(**GREEDY)
            assert short.token_ids == expected.token_ids[:60]
            assert short.speculation.num_draft_tokens == 0
            reader = Reader(stack, **long)
            await reader.read(5)
        await reader.finish()
        result = check_same(reader, expected)
        assert result.speculation.num_draft_tokens > 0
        await all_free(stack)


# The target.


@WIRE
async def test_a_full_target_lets_requests_wait_and_refuses_past_the_queue(wire: bool) -> None:
    async with run_stack(
        TARGET, DRAFT, wire=wire, target_settings={"num_pages": 8, "page_size": 16}, max_queue=2, **PATIENT
    ) as stack:
        expected = await alone(stack, GREEDY)
        async with occupied(stack.target, num_tokens=128):
            waiting = [asyncio.create_task(stack.generate(**GREEDY))]
            await eventually(lambda: stats_of(stack.coordinator).num_waiting == 1)
            waiting.append(asyncio.create_task(stack.generate(**GREEDY)))
            await eventually(lambda: stats_of(stack.coordinator).num_waiting == 2)
            with pytest.raises(CapacityError) as caught:
                await stack.generate(**GREEDY)
            assert caught.value.retry_after_ms > 0
            assert stats_of(stack.coordinator).num_refused == 1
            assert not any(task.done() for task in waiting)
        for result in await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_S):
            assert result.token_ids == expected.token_ids
        assert (await stack.generate(**GREEDY)).token_ids == expected.token_ids
        with pytest.raises(InvalidRequestError, match="max_tokens"):  # it would never fit
            await stack.generate(**{**GREEDY, "max_tokens": 500})
        await all_free(stack)


async def test_short_requests_do_not_overtake_a_long_one_that_waits_for_pages() -> None:
    small = {"num_pages": 8, "page_size": 16}
    async with run_stack(TARGET, DRAFT, wire=False, target_settings=small, **PATIENT) as stack:
        ended: list[int] = []
        requests = stack.coordinator.request_manager

        async def ask(max_tokens: int, prompt: list[int] = PROMPT) -> None:
            await stack.generate(**{**GREEDY, "max_tokens": max_tokens, "prompt_token_ids": prompt})
            ended.append(max_tokens)

        async with occupied(stack.target, num_tokens=80):  # of eight pages five; the long prompt needs four
            tasks = [asyncio.create_task(ask(20, PROMPT * 11))]
            await eventually(lambda: stats_of(stack.coordinator).num_waiting == 1)
            tasks += [asyncio.create_task(ask(max_tokens)) for max_tokens in (10, 9, 8)]
            await eventually(lambda: stats_of(stack.coordinator).num_waiting == 4)
            long = max((request.place for request in requests.all()), key=lambda place: place.max_length)
            tries = long.num_moves
            await eventually(lambda: long.num_moves >= tries + 2)
            assert ended == []
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        assert stats_of(stack.coordinator).num_finished == 4
        await all_free(stack)


@pytest.mark.parametrize("options", [GREEDY, COUPLED, SAMPLED], ids=["greedy", "coupled", "rejection"])
async def test_a_target_that_breaks_and_is_back_pauses_the_stream(options: dict[str, Any]) -> None:
    long = {**options, "max_tokens": 300}
    async with run_stack(TARGET, DRAFT, wire=True, **PATIENT) as stack:
        expected = await stack.generate(**long)
        reader = Reader(stack, **long)
        await reader.read(10)
        async with outage(stack, "target"):
            await eventually(lambda: not stack.coordinator.services.target.is_up)
            assert stats_of(stack.coordinator).num_running == 1
            late = asyncio.create_task(stack.generate(**long))
        await reader.finish()
        check_same(reader, expected)
        assert (await asyncio.wait_for(late, DEADLINE_S)).token_ids == expected.token_ids
        await all_free(stack)


async def test_links_that_break_again_and_again_change_no_token() -> None:
    async with run_stack(TARGET, DRAFT, wire=False, **PATIENT) as stack:
        expected = [await alone(stack, options) for options in (GREEDY, COUPLED)]
        readers = [Reader(stack, **options) for options in (GREEDY, COUPLED)]
        for num_tokens in (5, 15, 25):
            for reader in readers:
                await reader.read(num_tokens)
            break_links(stack.target)
            break_links(stack.draft)
        for reader, result in zip(readers, expected, strict=True):
            await reader.finish()
            check_same(reader, result)
        await all_free(stack)


async def test_a_target_that_stays_away_is_told_in_one_error() -> None:
    async with run_stack(TARGET, DRAFT, wire=True, target_timeout_s=0.3, **PATIENT) as stack:
        expected = await alone(stack, GREEDY)
        reader = Reader(stack, **{**GREEDY, "max_tokens": 900})
        await reader.read(5)
        async with outage(stack, "target"):
            with pytest.raises(UnavailableError, match="target was not back"):
                await reader.finish()
            with pytest.raises(UnavailableError, match="target"):
                await stack.generate(**GREEDY)
        assert reader.token_ids[:60] == expected.token_ids[: len(reader.token_ids)]
        await eventually(lambda: stack.coordinator.services.target.is_up)
        assert (await stack.generate(**GREEDY)).token_ids == expected.token_ids
        await all_free(stack)


# Sessions.


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("options", "wire"), [(GREEDY, False), (COUPLED, False), (SAMPLED, True)], ids=["greedy", "coupled", "rejection"]
)
async def test_a_lost_session_is_rebuilt(options: dict[str, Any], role: str, wire: bool) -> None:
    async with run_stack(TARGET, DRAFT, wire=wire, **PATIENT) as stack:
        expected = await stack.generate(**options)
        lose_sessions(getattr(stack, role), at_item=6)
        result = await stack.generate(**options)
        assert result.token_ids == expected.token_ids
        assert result.text == expected.text
        assert result.speculation == expected.speculation
        spec_stats = stats_of(stack.coordinator).spec_stats
        assert (spec_stats.num_target_losses, spec_stats.num_draft_losses) == ((1, 0) if role == "target" else (0, 1))
        await all_free(stack)


async def test_bad_numbers_of_one_session_fail_that_request_alone() -> None:
    neighbours = [{**GREEDY, "prompt_token_ids": [first, 2, 3]} for first in (10, 11)]
    small = {"num_pages": 60, "page_size": 4}  # what the poisoned session held is soon another's
    async with run_stack(TARGET, DRAFT, wire=True, target_settings=small, **PATIENT) as stack:
        expected = [await alone(stack, options) for options in neighbours]
        with poisoned(stack.target.runner, 99, at_length=12):
            bad = asyncio.create_task(stack.generate(**{**GREEDY, "prompt_token_ids": [99, 2, 3]}))
            good = [asyncio.create_task(stack.generate(**options)) for options in neighbours]
            with pytest.raises(NonFiniteLogitsError):
                await asyncio.wait_for(bad, DEADLINE_S)
            for task, result in zip(good, expected, strict=True):
                assert (await asyncio.wait_for(task, DEADLINE_S)).token_ids == result.token_ids
        after = await asyncio.gather(*(stack.generate(**options) for options in [*neighbours, *neighbours]))
        assert [result.token_ids for result in after] == 2 * [result.token_ids for result in expected]
        await all_free(stack)


@EXACT
async def test_bad_numbers_in_the_draft_cost_speed_alone(options: dict[str, Any]) -> None:
    poisonous, neighbour = {**options, "prompt_token_ids": [99, 2, 3]}, {**options, "prompt_token_ids": [10, 2, 3]}
    async with run_stack(TARGET, DRAFT, wire=False, **PATIENT) as stack:
        expected = [await alone(stack, request) for request in (poisonous, neighbour)]
        with poisoned(stack.draft.runner, 99, at_length=20):  # type: ignore[union-attr]
            results = await asyncio.gather(*(stack.generate(**request) for request in (poisonous, neighbour)))
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        drafted = [result.speculation.num_draft_tokens for result in results]
        assert 4 <= drafted[0] < 30 < drafted[1]
        await all_free(stack)


@asynccontextmanager
async def occupied(service: Any, *, num_tokens: int) -> AsyncIterator[None]:
    """An older session, of another coordinator, holds so many tokens."""
    await eventually(lambda: service.num_sessions == 0)
    link = await service.attach()
    opening = Open(
        session=1,
        generation=1,
        sampling=SamplingParams(),
        seed=0,
        judging_rule=JudgingRule.REJECTION,
        prompt_length=1,
        max_length=num_tokens,
        num_token_ids=257,
    )
    text = (1,) * num_tokens
    link.send(
        [
            opening,
            Extend(1, 2, 0, EMPTY_PREFIX, text, 0)
            if service.description.role == "draft"
            else Score(1, 2, 0, EMPTY_PREFIX, text),
        ]
    )
    async for batch in link.events():
        if any(isinstance(event, Proposal | Scores) for event in batch.events):
            break
    yield
    await link.close()
