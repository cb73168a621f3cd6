"""Streams that nobody reads: their pages go to others, and they go on where they were read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from outrider.generation import GenerationResult
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

PAGE, NUM_PAGES = 16, 50
PROMPT = [72, 101, 108]
MAX_TOKENS, LOGPROBS = 320, 100
"""Tokens with as many logprobs each: more than the windows and buffers on the way take."""
SECONDS = 240.0


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """Stack with pages for two of these streams."""
    model = cached_tiny_model("llama", seed=1, max_position_embeddings=8192)
    pages = {"page_size": PAGE, "num_pages": NUM_PAGES}
    more: dict[str, Any] = {"draft_timeout_ms": 60_000, "max_logprobs": LOGPROBS}
    async with run_stack(model, model, wire=True, target_settings=pages, draft_settings=pages, **more) as stack:
        yield stack


def asked(method: str, seed: int) -> dict[str, Any]:
    return {"seed": seed, "temperature": 0 if method == "greedy" else 1, "max_tokens": MAX_TOKENS, "logprobs": LOGPROBS}


def is_paused(stack: Stack, count: int) -> Callable[[], bool]:
    def holds() -> bool:
        (found,) = [r.value for r in stack.coordinator.readings() if r.name == "outrider_num_requests_paused"]
        return found == count and stack.num_pages_used() == (0, 0)

    return holds


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.02)


async def test_unread_grpc_streams_pause_without_pages_and_go_on_with_the_same_tokens(stack: Stack) -> None:
    def options(seed: int) -> dict[str, Any]:
        how = {"acceptance_method": "coupled"} if seed % 2 else {}
        return {"prompt_token_ids": PROMPT, "ignore_eos": True, **asked("coupled" if how else "greedy", seed), **how}

    expected = [await stack.generate(**options(seed)) for seed in range(2)]
    streams = [stack.stream(**options(seed)) for seed in range(3)]
    for stream in streams:
        await anext(stream)
    await eventually(is_paused(stack, len(streams)))
    beside = await stack.generate(**options(0))
    assert beside.token_ids == expected[0].token_ids
    for stream, wanted in zip(streams, expected, strict=False):
        result = await _last(stream)
        assert result.token_ids == wanted.token_ids
        assert result.timing.paused > 0
    for stream in streams[2:]:
        await stream.aclose()
    await eventually(is_paused(stack, 0))


async def _last(stream: AsyncIterator[Any]) -> GenerationResult:
    result: GenerationResult = [delta async for delta in stream][-1].result
    return result
