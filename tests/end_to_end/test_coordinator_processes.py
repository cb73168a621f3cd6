"""``outrider coordinator`` as processes: signals end one, and two on one port both serve; when one ends, its streams go
on at the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider import AsyncClient
from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.probe import is_serving
from outrider.errors import UnavailableError
from outrider.generation import GenerationResult
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

DEADLINE_S = 240.0
NUM_CLIENTS = 16
"""Clients of which all reach one process by chance in 1 of 30,000 runs."""
LONG: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
REQUEST: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def stack_of() -> contextlib.AbstractAsyncContextManager[Stack]:
    return run_stack(cached_tiny_model("llama", seed=1, max_position_embeddings=16384), wire=True)


@contextlib.asynccontextmanager
async def coordinator_process(stack: Stack, address: str, *flags: str) -> AsyncIterator[Process]:
    """A coordinator beside the stack's target, once it serves at its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", "coordinator", "--target-address", stack.addresses["target"]),
        *("--drain-delay-s", "0", *flags),
        stderr=DEVNULL,
    )
    try:
        await serving(address)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def one_coordinator(*flags: str) -> AsyncIterator[tuple[Process, str]]:
    """A coordinator that serves, and its address."""
    port = hold_port()
    async with (
        stack_of() as stack,
        coordinator_process(stack, address := f"127.0.0.1:{port}", "--port", str(port), *flags) as process,
    ):
        yield process, address


async def serving(address: str, *, is_expected: bool = True) -> None:
    """Return when the address serves, or no longer does."""
    async with asyncio.timeout(DEADLINE_S):
        while await is_serving(address, waits=is_expected) is not is_expected:
            await asyncio.sleep(0.01)


async def test_a_second_sigterm_ends_it_at_once() -> None:
    async with one_coordinator("--drain-grace-s", "600") as (process, address), AsyncClient(address) as client:
        stream = client.stream(**LONG)
        await anext(stream)
        process.terminate()
        await serving(address, is_expected=False)
        await anext(stream)
        assert process.returncode is None
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(UnavailableError):
                async for _ in stream:
                    pass
            assert await process.wait() == 0


async def test_an_interrupt_ends_it_like_a_sigterm() -> None:
    async with one_coordinator() as (process, _):
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


@dataclass
class Coordinator:
    """One of the processes."""

    process: Process
    own: AsyncClient

    async def num_running(self) -> int:
        return (await self.own.model_info()).num_running


@dataclass
class Stream:
    """One client, which is one connection, and its stream, read in the background."""

    num_tokens: int = 0
    result: GenerationResult | None = None

    async def read(self, address: str) -> None:
        async with AsyncClient(address) as client:
            async for delta in client.stream(resume=True, resume_timeout=DEADLINE_S, **REQUEST):
                self.num_tokens += len(delta.token_ids)
                self.result = delta.result or self.result


@contextlib.asynccontextmanager
async def two_coordinators() -> AsyncIterator[tuple[str, list[Coordinator], GenerationResult]]:
    """The address that they share, both of them, and the result without any fault."""
    port = hold_port()
    async with stack_of() as stack, contextlib.AsyncExitStack() as running:
        found = []
        for own_port in (hold_port(), hold_port()):
            own, flags = f"127.0.0.1:{own_port}", ("--port", str(port), "--reuse-port", "--own-port", str(own_port))
            process = await running.enter_async_context(coordinator_process(stack, own, *flags))
            found.append(Coordinator(process, await running.enter_async_context(AsyncClient(own))))
        yield f"127.0.0.1:{port}", found, await found[0].own.generate(**REQUEST)


@contextlib.asynccontextmanager
async def streams_of(address: str) -> AsyncIterator[tuple[list[Stream], asyncio.Future[Any]]]:
    """Streams over connections of their own, which all run inside, and when all have ended."""
    streams = [Stream() for _ in range(NUM_CLIENTS)]
    reading = asyncio.gather(*(stream.read(address) for stream in streams))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not all(stream.num_tokens for stream in streams) and not reading.done():
                await asyncio.sleep(0.005)
        yield streams, reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])


@pytest.mark.parametrize("how", ["kill", "terminate"])
async def test_streams_of_one_that_ends_lose_no_token(how: str) -> None:
    """Killed, its streams resume at the other; asked to end, it lets them finish. New connections reach the other."""
    async with two_coordinators() as (address, (first, second), expected), streams_of(address) as (streams, reading):
        running = await asyncio.gather(first.num_running(), second.num_running())
        assert min(running) > 0 and sum(running) <= NUM_CLIENTS, running
        getattr(first.process, how)()
        async with asyncio.timeout(DEADLINE_S):
            await reading
            await first.process.wait()
        assert [stream.result and stream.result.token_ids for stream in streams] == [expected.token_ids] * NUM_CLIENTS
        for _ in range(8):
            async with AsyncClient(address) as client:
                assert (await client.generate(**{**REQUEST, "max_tokens": 2})).token_ids == expected.token_ids[:2]
        assert second.process.returncode is None
