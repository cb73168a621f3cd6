"""Ended requests are freed at once: the garbage collector would hold up all sessions while it looks for them."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outrider_coordinator.requests import request_runner
from tests.end_to_end.waiting import Reader, all_free, eventually
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1)
DRAFT = cached_tiny_model("qwen2", seed=9)
ASKED: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}


async def finish(stack: Stack) -> None:
    await asyncio.gather(*(stack.generate(**ASKED, temperature=temperature) for temperature in (0, 0, 1.0)))


async def finish_without_drafts(stack: Stack) -> None:
    await stack.generate(**ASKED, num_speculative_tokens=0)


async def finish_with_logprobs(stack: Stack) -> None:
    await stack.generate(**ASKED, logprobs=2, prompt_logprobs=1)


async def stop(stack: Stack) -> None:
    await stack.generate(**ASKED, stop=list("aeiou rst,.()"))


async def leave(stack: Stack) -> None:
    reader = Reader(stack, **{**ASKED, "max_tokens": 200})
    await reader.read(3)
    await reader.close()


@contextmanager
def counted_garbage() -> Iterator[Counter[str]]:
    """Counts the objects that only the garbage collector would free, by the full name of their type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def found_after(play: Callable[[Stack], Awaitable[None]], *, wire: bool) -> Counter[str]:
    """Sessions and pages after a few plays."""
    async with run_stack(TARGET, DRAFT, wire=wire, draft_timeout_ms=60_000) as stack:
        await play(stack)  # what is made only once has been made
        await all_free(stack)
        with counted_garbage() as found:
            for _ in range(2):
                await play(stack)
            await all_free(stack)
        return found


@pytest.mark.parametrize("wire", [False, True], ids=["in process", "over grpc"])
@pytest.mark.parametrize(
    "play", [finish, finish_without_drafts, finish_with_logprobs, stop, leave], ids=lambda play: play.__name__
)
async def test_a_request_leaves_no_garbage_of_ours(play: Callable[[Stack], Awaitable[None]], wire: bool) -> None:
    found = await found_after(play, wire=wire)
    assert not {name for name in found if name.startswith("outrider")}
    assert wire or not found  # gRPC leaves some of its own


async def test_a_request_that_was_paused_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers leave none either, of which one has fired, and one has not when it ends."""
    monkeypatch.setattr(request_runner, "MAX_PAUSE_WITH_PAGES_S", 0.01)

    async def pause(stack: Stack) -> None:
        reader = Reader(stack, **{**ASKED, "max_tokens": 200}, timeout=600.0)
        await reader.read(3)
        await eventually(lambda: "outrider_num_requests_paused" in paused(stack), "a pause without pages")
        await reader.finish()

    def paused(stack: Stack) -> set[str]:
        has_pages = stack.num_pages_used() != (0, 0)
        return set() if has_pages else {reading.name for reading in stack.coordinator.readings() if reading.value == 1}

    assert not await found_after(pause, wire=False)


def test_a_cycle_is_counted() -> None:
    with counted_garbage() as found:
        reader: Any = Reader.__new__(Reader)
        reader.itself = reader
        del reader
    assert found["tests.end_to_end.waiting.Reader"] == 1
