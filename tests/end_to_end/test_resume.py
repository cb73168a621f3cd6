"""Real coordinators killed in the middle of streams: with ``resume=True`` every stream is its undisturbed twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from outrider import AsyncClient
from outrider.generation import Delta, GenerationResult
from tests.faults.processes import Process, ServiceProcess
from tests.faults.stack import Layout, Stack, run_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

PROMPT = "# Größe: überprüft\nnames = {'é': 1, '漢': 2}\nfor name in names:\n"
PATIENT = {"target_timeout_s": 600, "draft_timeout_ms": 10_000}
COMMON: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {**COMMON, "temperature": 0.0},
    {**COMMON, "temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 1},
    {**COMMON, "temperature": 0.9, "seed": 7, "acceptance_method": "coupled", "presence_penalty": 0.6},
    {**COMMON, "temperature": 0.9, "seed": 8, "acceptance_method": "coupled", "prompt_logprobs": 0},
    {**COMMON, "temperature": 0.0, "min_tokens": 60, "stop": ["\n", "self", "in "], "ignore_eos": False},
]


class Reader:
    """One stream, read to its end in the background."""

    def __init__(self, client: AsyncClient, options: dict[str, Any]) -> None:
        self.deltas: list[Delta] = []
        self.num_tokens = 0
        self._task = asyncio.create_task(self._read(client, options))

    async def _read(self, client: AsyncClient, options: dict[str, Any]) -> None:
        async for delta in client.stream(resume=True, resume_timeout=300, **options):
            self.deltas.append(delta)
            self.num_tokens += len(delta.token_ids)

    async def until(self, num_tokens: int) -> None:
        """Return when so many tokens have come, or the stream has ended."""
        async with asyncio.timeout(300):
            while self.num_tokens < num_tokens and not self._task.done():
                await asyncio.sleep(0.005)

    async def result(self) -> GenerationResult:
        await asyncio.wait_for(self._task, 600)
        result = self.deltas[-1].result
        assert result is not None
        assert sum((delta.token_ids for delta in self.deltas), ()) == result.token_ids
        assert "".join(delta.text for delta in self.deltas) == result.text
        return result


def comparable(result: GenerationResult) -> dict[str, Any]:
    """All that may not depend on interruptions."""
    logprobs = [entry.token_id for entry in result.logprobs or ()]
    prompt_logprobs = [entry and entry.token_id for entry in result.prompt_logprobs or ()]
    names = ("token_ids", "text", "finish_reason", "matched_stop")
    return {
        **{name: getattr(result, name) for name in names},
        "usage": (
            result.usage.prompt_tokens,
            result.usage.completion_tokens,
        ),  # what was cached depends on who asked before
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Two coordinators of one target and draft; the last test ends the first of them for good."""
    async with run_stack(Layout(num_coordinators=2, coordinator=PATIENT)) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(stack: Stack) -> list[dict[str, Any]]:
    """Output of each request, undisturbed and without a draft."""
    async with AsyncClient(stack.coordinators[0].address) as client:
        return [comparable(await client.generate(**{**request, "num_speculative_tokens": 0})) for request in REQUESTS]


async def check_all_are_twins(stack: Stack, readers: list[Reader], expected: list[dict[str, Any]]) -> None:
    results = [await reader.result() for reader in readers]
    assert [comparable(result) for result in results] == expected
    # An interrupted call's tokens are counted up to its last Progress; those of the last call all are.
    counted = [result.speculation.num_steps + result.speculation.num_accepted_tokens for result in results[:4]]
    assert all(0 < num_tokens <= 120 for num_tokens in counted), counted
    assert not await stack.idle(), "sessions or pages are left"
    assert not stack.crashes


async def kill_and_wait(process: Process) -> None:
    """Return when its next life has begun."""
    before = process.pid
    process.kill()
    async with asyncio.timeout(300):
        while process.pid in (None, before):
            await asyncio.sleep(0.01)


async def test_a_coordinator_killed_twice_restarts_on_its_port_and_every_stream_goes_on(
    stack: Stack, expected: list[dict[str, Any]]
) -> None:
    async with AsyncClient(stack.coordinators[0].address) as client:
        readers = [Reader(client, request) for request in REQUESTS]
        for num_tokens in (10, 60):
            await asyncio.gather(*(reader.until(num_tokens) for reader in readers))
            await kill_and_wait(stack.coordinators[0])
        await check_all_are_twins(stack, readers, expected)


async def test_streams_of_a_coordinator_that_is_gone_go_on_at_another(
    stack: Stack, expected: list[dict[str, Any]]
) -> None:
    gone, other = stack.coordinators
    async with AsyncClient([gone.address, other.address]) as client:
        readers = [Reader(client, request) for request in REQUESTS]
        await asyncio.gather(*(reader.until(20) for reader in readers))
        served_before = await num_ended(other)
        assert isinstance(gone, ServiceProcess)
        await gone.stop()
        results = [await reader.result() for reader in readers]
        assert [comparable(result) for result in results] == expected
        assert await num_ended(other) - served_before == len(readers)


async def num_ended(coordinator: Process) -> float:
    metrics = await coordinator.metrics()
    assert metrics is not None
    return sum(value for name, value in metrics.items() if name.startswith("outrider_requests_total"))
