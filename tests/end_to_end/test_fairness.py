"""Batching and fairness, in counts of forwards and never in seconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outrider.batched import one_by_one
from outrider.client.requests import build_request
from outrider.generation import GenerationResult
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Score
from tests.end_to_end.faults import Rows, around_forwards, gate_of
from tests.end_to_end.waiting import DEADLINE_S, Reader, all_free, eventually
from tests.support.coordinator_stats import stats_of
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1, max_position_embeddings=8192)
PATIENT: dict[str, Any] = {"draft_timeout_ms": 60_000}
NUM_SESSIONS = 16
RUNNING, ARRIVING = 77, 88  # the first tokens by which sessions are told apart
CHUNK = 128
LONG_PROMPT = [ARRIVING, *(i % 251 for i in range(3_999))]
WIRE = pytest.mark.parametrize("wire", [False, True], ids=["in process", "over grpc"])


@contextmanager
def counting(runner: ModelRunner | None) -> Iterator[list[dict[int, int]]]:
    """Number of tokens of each session in each forward, by the session's first token."""
    assert runner is not None
    forwards: list[dict[int, int]] = []

    def note(rows: Rows) -> None:
        forwards.append({(*row.sequence.token_ids[:1], *row.token_ids)[0]: len(row.token_ids) for row in rows})

    with around_forwards(runner, note):
        yield forwards


async def ask_coordinator(stack: Stack, **options: Any) -> GenerationResult:
    """Past the public wire, on which requests arrive one after another: these begin together."""
    request, _ = build_request(options)  # type: ignore[arg-type]
    deltas = [delta async for delta in stack.coordinator.generate_stream(request)]
    assert deltas[-1].result is not None
    return deltas[-1].result


def sixteen(**options: Any) -> list[dict[str, Any]]:
    common = {"temperature": 0, "ignore_eos": True, **options}
    return [{**common, "prompt_token_ids": [index, 5, 9]} for index in range(NUM_SESSIONS)]


@WIRE
async def test_sixteen_running_sessions_take_one_forward_a_step(wire: bool) -> None:
    async with run_stack(TARGET, None, wire=wire, **PATIENT) as stack:
        with counting(stack.target.runner) as forwards:
            results = await asyncio.gather(*(ask_coordinator(stack, **options) for options in sixteen(max_tokens=30)))
        assert [len(forward) for forward in forwards] == [NUM_SESSIONS] * 30
        assert {len(result.token_ids) for result in results} == {30}


@WIRE
async def test_sixteen_speculating_sessions_take_one_forward_a_step_of_each_model(wire: bool) -> None:
    async with run_stack(TARGET, TARGET, wire=wire, **PATIENT) as stack:
        with (
            counting(stack.target.runner) as scoring,
            counting(stack.draft.runner) as drafting,  # type: ignore[union-attr]
        ):
            options = sixteen(max_tokens=26, num_speculative_tokens=4)
            results = await asyncio.gather(*(ask_coordinator(stack, **each) for each in options))
        # A prefill, then five steps of four drafts and a bonus each; the draft takes four forwards for a proposal.
        assert {result.speculation.num_steps for result in results} == {6}
        assert [len(forward) for forward in scoring] == [NUM_SESSIONS] * 6
        num_asked = 1 + 5 * 4
        assert [len(forward) for forward in drafting[:num_asked]] == [NUM_SESSIONS] * num_asked
        assert len(drafting) - num_asked <= 4, "one proposal at most is begun at the last verdict, and not used"


async def test_sessions_that_fell_out_of_step_still_share_forwards() -> None:
    """Each begins when the one before it has its third token: nobody waits for a fuller batch, and none is alone."""
    async with run_stack(TARGET, None, wire=True, **PATIENT) as stack:
        readers: list[Reader] = []
        with counting(stack.target.runner) as forwards:
            for options in sixteen(max_tokens=120):
                readers.append(Reader(stack, **options))
                await readers[-1].read(3)
            await asyncio.gather(*(reader.finish() for reader in readers))
        assert len(forwards) < NUM_SESSIONS * 120 / 2
        assert max(len(forward) for forward in forwards) > NUM_SESSIONS / 2


class Arrivals:
    """Number of forwards begun when a core was handed each item of a session."""

    def __init__(self, service: Any, forwards: list[dict[int, int]]) -> None:
        self.by_session: dict[int, list[int]] = {}
        handle = service.core.handle

        def noting(link_id: int, commands: Any, **rest: Any) -> None:
            for command in one_by_one(commands):
                if isinstance(command, Score | Extend):
                    self.by_session.setdefault(command.session, []).append(len(forwards))
            handle(link_id, commands, **rest)

        service.core.handle = noting


@WIRE
@pytest.mark.parametrize("draft_length", [0, 4])
async def test_a_running_stream_goes_on_through_a_long_prefill(draft_length: int, wire: bool) -> None:
    chunked = {"max_batched_tokens": CHUNK}
    async with run_stack(
        TARGET,
        TARGET,
        wire=wire,
        target_settings=chunked,
        draft_settings=chunked,
        draft_ahead="in_turn",  # an item for a proposal that was begun before, and has ended, needs no forward
        **PATIENT,
    ) as stack:
        common = {"temperature": 0, "ignore_eos": True, "num_speculative_tokens": draft_length}
        alone = await stack.generate(prompt_token_ids=[RUNNING, 1], max_tokens=300, **common)
        await all_free(stack)
        with (
            counting(stack.target.runner) as scoring,
            counting(stack.draft.runner) as drafting,  # type: ignore[union-attr]
        ):
            to_target, to_draft = Arrivals(stack.target, scoring), Arrivals(stack.draft, drafting)
            running = Reader(stack, prompt_token_ids=[RUNNING, 1], max_tokens=300, **common)
            await running.read(5)
            arriving = asyncio.create_task(stack.generate(prompt_token_ids=LONG_PROMPT, max_tokens=3, **common))
            last = await running.finish()
            await arriving
        assert last.result is not None
        assert last.result.token_ids == alone.token_ids
        check_chunks(scoring)
        check_nobody_waits(scoring, to_target, is_ahead=not draft_length)
        if draft_length:
            check_chunks(drafting)
            check_nobody_waits(drafting, to_draft)
        await all_free(stack)


def check_chunks(forwards: list[dict[int, int]]) -> None:
    """The long prompt is cut to the budget, is not starved itself, and the running session goes on beside it."""
    assert all(sum(forward.values()) <= CHUNK for forward in forwards)
    prefilling = [index for index, forward in enumerate(forwards) if forward.get(ARRIVING, 0) > 8]
    assert sum(forwards[index][ARRIVING] for index in prefilling) == len(LONG_PROMPT)
    assert len(LONG_PROMPT) // CHUNK <= len(prefilling) <= 1.2 * len(LONG_PROMPT) / CHUNK
    assert sum(RUNNING in forward for forward in forwards[prefilling[0] : prefilling[-1]]) >= 2


def check_nobody_waits(forwards: list[dict[int, int]], arrivals: Arrivals, *, is_ahead: bool = False) -> None:
    """An item that has arrived for the running session is in the very next forward; or, where the
    service computes ahead, it was in the one before.
    """
    of_running = arrivals.by_session[min(arrivals.by_session)]
    assert len(of_running) > 30
    for num_before in of_running:
        assert any(RUNNING in forward for forward in forwards[max(0, num_before - is_ahead) : num_before + 1])


@WIRE
async def test_waiting_requests_go_by_priority(wire: bool) -> None:
    one_at_a_time: dict[str, Any] = {"scheduling_policy": "priority", "max_running_requests": 1}
    async with run_stack(TARGET, None, wire=wire, **one_at_a_time, **PATIENT) as stack:
        ended: list[int] = []

        async def ask(first: int, priority: int) -> None:
            await stack.generate(prompt_token_ids=[first, 1], max_tokens=3, temperature=0, priority=priority)
            ended.append(first)

        with gate_of(stack.target.runner) as gate:
            asking = [asyncio.create_task(ask(0, 9))]
            await gate.shut()  # it runs, and gives way to none
            for first, priority in [(1, 3), (2, 0), (3, -3)]:
                asking.append(asyncio.create_task(ask(first, priority)))
                await eventually(lambda: stats_of(stack.coordinator).num_waiting == len(asking) - 1, "it waits")
            gate.open()
            await asyncio.gather(*asking)
    assert ended == [0, 3, 2, 1]


async def test_a_running_streams_gap_during_a_long_prefill_is_one_forward_at_most() -> None:
    """One chunk lies between two tokens if the coordinator has its turn while it is computed; none does where the chunk
    has waited for the running session.
    """
    loop = asyncio.get_running_loop()

    async def several_turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def give_turns(rows: Rows) -> None:
        asyncio.run_coroutine_threadsafe(several_turns(), loop).result(DEADLINE_S)

    async with run_stack(TARGET, None, wire=False, target_settings={"max_batched_tokens": CHUNK}, **PATIENT) as stack:
        with counting(stack.target.runner) as forwards, around_forwards(stack.target.runner, give_turns):
            running = Reader(stack, prompt_token_ids=[RUNNING, 1], max_tokens=100, temperature=0, ignore_eos=True)
            await running.read(5)
            arriving = asyncio.create_task(stack.generate(prompt_token_ids=LONG_PROMPT, max_tokens=3, temperature=0))
            await running.finish()
            await arriving
    served = [index for index, forward in enumerate(forwards) if RUNNING in forward]
    assert len(served) == 100
    assert {after - before for before, after in itertools.pairwise(served)} <= {1, 2}
