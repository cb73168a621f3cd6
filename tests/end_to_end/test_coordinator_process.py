"""``outrider coordinator`` as a process of its own, beside a target of this one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from outrider import AsyncClient
from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.probe import is_serving
from outrider.errors import UnavailableError
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 120.0
LONG: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "max_tokens": 8000, "temperature": 0, "ignore_eos": True}


@contextlib.asynccontextmanager
async def coordinator_process(*arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A coordinator that serves, and its address."""
    model = cached_tiny_model("llama", seed=1, max_position_embeddings=16384)
    port = hold_port()
    async with run_stack(model, wire=True) as stack:
        target = stack.addresses["target"]
        flags = ("--port", str(port), "--target-address", target, "--drain-delay-s", "0", *arguments)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.cli", "coordinator", *flags), stderr=DEVNULL
        )
        try:
            address = f"127.0.0.1:{port}"
            await until(lambda: is_serving(address))
            yield process, address
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_a_second_sigterm_ends_it_at_once() -> None:
    async with coordinator_process("--drain-grace-s", "600") as (process, address), AsyncClient(address) as client:
        stream = client.stream(**LONG)
        await anext(stream)
        process.terminate()
        await until(lambda: _is_draining(address))
        await anext(stream)
        assert process.returncode is None
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(UnavailableError):
                async for _ in stream:
                    pass
            assert await process.wait() == 0


async def _is_draining(address: str) -> bool:
    return not await is_serving(address)


async def test_an_interrupt_ends_it_like_a_sigterm() -> None:
    async with coordinator_process() as (process, _):
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
