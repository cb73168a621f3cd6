"""Event loop pauses while a long prompt is refused and another one admitted: `python scripts/long_prompts.py`.

Starts a coordinator, a draft and a target of stand-ins, each a process of its own, and is their client. In each process
a task asks for its turn every millisecond. Printed for each process is the longest time between two of its turns, and
the most processor time that the event loop's thread took between two: on a busy machine only the second is the code's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from outrider.benchmarks.child_process import child_process
from outrider.benchmarks.step.stand_in import VOCAB_SIZE, make_draft, make_target
from outrider.client import AsyncClient
from outrider.config import CoordinatorSettings
from outrider.demo import TARGET
from outrider.errors import InvalidRequestError
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.server import serve_draft, serve_generation, serve_target
from outrider_coordinator.service import Coordinator

MAX_MODEL_LEN = 200_000
REFUSED, ADMITTED = 500_000, 100_000
"""Ids of the two prompts."""
_PROBE_S = 0.001
Pause = tuple[float, float, float]
"""When it ended by the machine's clock, seconds of it, and seconds of the loop thread's processor time in it."""


async def probe(pauses: list[Pause]) -> None:
    """Note every time between two turns."""
    while True:
        asked, spent = time.monotonic(), time.thread_time()
        await asyncio.sleep(_PROBE_S)
        now = time.monotonic()
        pauses.append((now, now - asked - _PROBE_S, time.thread_time() - spent))


async def serve(given: argparse.Namespace) -> None:
    """One of the three processes, until its standard input ends."""
    pauses: list[Pause] = []
    probing = asyncio.create_task(probe(pauses))
    async with contextlib.AsyncExitStack() as stack:
        server = await _listen(given, stack)
        await server.set_serving(True)
        print(server.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        probing.cancel()
        Path(given.notes).write_text(json.dumps(pauses), encoding="utf-8")
        await server.stop()


async def _listen(given: argparse.Namespace, stack: contextlib.AsyncExitStack) -> Any:  # noqa: ANN401
    if given.role == "coordinator":
        settings = CoordinatorSettings.model_validate({"tokenizer": str(TARGET)})
        coordinator = Coordinator(RemoteTarget(given.target), RemoteDraft(given.draft), settings)
        await coordinator.start()
        stack.push_async_callback(coordinator.close)
        return await serve_generation(coordinator, host="127.0.0.1", port=0)
    forward: dict[str, Any] = {"busy_s": 0.001, "acceptance": 0.75, "note": lambda stamp, items: None}
    if given.role == "draft":
        return await serve_draft(make_draft(**forward), host="127.0.0.1", port=0)
    return await serve_target(make_target(**forward, max_model_len=MAX_MODEL_LEN), host="127.0.0.1", port=0)


async def measure() -> dict[str, dict[str, Pause]]:
    """For each event and each process the longest pause."""
    pauses: list[Pause] = []
    rng = random.Random(1)
    prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in (REFUSED, ADMITTED)]
    with tempfile.TemporaryDirectory() as folder:
        async with _stack(Path(folder)) as address, AsyncClient(address) as client:
            await client.generate(prompt_token_ids=[1, 2, 3], max_tokens=8)
            probing = asyncio.create_task(probe(pauses))
            began = [time.monotonic()]
            await asyncio.sleep(2)
            began.append(time.monotonic())
            with contextlib.suppress(InvalidRequestError):
                await client.generate(prompt_token_ids=prompts[0], max_tokens=8)
                raise AssertionError("the prompt was to be refused")
            began.append(time.monotonic())
            await client.generate(prompt_token_ids=prompts[1], max_tokens=64, ignore_eos=True, temperature=0)
            began.append(time.monotonic())
            probing.cancel()
        noted = {role: json.loads((Path(folder) / role).read_text()) for role in ("coordinator", "draft", "target")}
    names = ("nothing", f"{REFUSED:,} refused", f"{ADMITTED:,} admitted")
    windows = dict(zip(names, itertools.pairwise(began), strict=True))
    return {
        name: {role: _longest(own, *window) for role, own in {**noted, "client": pauses}.items()}
        for name, window in windows.items()
    }


def _longest(pauses: list[Pause], start: float, end: float) -> Pause:
    within = [pause for pause in pauses if start < pause[0] and pause[0] - pause[1] < end]
    return end, max((pause[1] for pause in within), default=0.0), max((pause[2] for pause in within), default=0.0)


@contextlib.asynccontextmanager
async def _stack(folder: Path) -> AsyncIterator[str]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(role: str, *arguments: str) -> str:
            noted = ("--role", role, "--notes", str(folder / role))
            address, _ = await stack.enter_async_context(child_process(__file__, *noted, *arguments))
            return address

        yield await start("coordinator", "--draft", await start("draft"), "--target", await start("target"))


def main() -> None:
    """The table, or one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("draft", "target", "coordinator"))
    for name in ("--notes", "--draft", "--target"):
        parser.add_argument(name)
    given = parser.parse_args()
    if given.role:
        uvloop.run(serve(given))
        return
    print("longest pause of the event loop, ms (of it processor time of its thread)")
    for name, found in uvloop.run(measure()).items():
        told = "  ".join(f"{role} {1e3 * wall:.1f} ({1e3 * cpu:.1f})" for role, (_, wall, cpu) in found.items())
        print(f"{name:>18}: {told}")


if __name__ == "__main__":
    main()
