"""Hidden states between services in processes of their own, either of which is killed while states travel.

No request fails, no token differs, the other process lives and holds no more than before, nothing is left in shared
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing as mp
import os
import random
import signal
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.stack.held_ports import hold_port
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.generation import GenerationRequest
from outrider.tensor_plane import shared_file
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.server import serve_draft, serve_target
from outrider.types import SamplingParams
from outrider_coordinator.service import Coordinator
from outrider_draft.service import DraftService
from outrider_target.service import TargetService
from tests.end_to_end.waiting import eventually
from tests.support.coordinator_stats import stats_of
from tests.support.eagle3 import build_eagle3
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model
from tests.tensor_plane.peers import holdings

TARGET = cached_tiny_model("llama", seed=1)
DEADLINE_S = 240.0
NUM_KILLS = [
    pytest.param(2, id="short"),
    pytest.param(100, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
_DRAFTED_TOKENS = 4
"""Tokens of a request after which it has drafted: the first step has no draft, and the ones after it do."""
GPU_KILLS = [pytest.param(5, id="short"), NUM_KILLS[1]]

_context = mp.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def serve(pipe: Connection, role: str, settings: dict[str, Any], port: int) -> None:
    """One service, until it is killed."""

    async def run() -> None:
        if role == "target":
            target = TargetService.load(TargetSettings(**settings))
            server = await serve_target(target, host="127.0.0.1", port=port)
        else:
            draft = DraftService.load(DraftSettings.model_validate(settings))
            server = await serve_draft(draft, host="127.0.0.1", port=port)
        pipe.send("serving")
        await asyncio.get_running_loop().create_future()
        await server.stop()  # never reached; a server that nothing refers to ends

    asyncio.run(run())


class Service:
    """A service that is started again and again at one port."""

    def __init__(self, role: str, **settings: Any) -> None:
        self.role, self.settings, self.port = role, {"num_threads": 1, "page_size": 4, **settings}, hold_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process: BaseProcess | None = None

    async def start(self) -> None:
        ours, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, self.role, self.settings, self.port), daemon=True)
        self.process.start()
        theirs.close()
        with contextlib.closing(ours):
            assert await asyncio.to_thread(ours.poll, DEADLINE_S), f"the {self.role} does not start"
            assert ours.recv() == "serving"

    async def kill(self) -> None:
        if self.process is not None and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
            await asyncio.to_thread(self.process.join, DEADLINE_S)

    def num_descriptors(self) -> int:
        assert self.process is not None
        assert self.process.is_alive()
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextlib.asynccontextmanager
async def coordinator_of(target: Service, draft: Service) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings.model_validate(
        {"draft_length": "fixed", "num_speculative_tokens": 4, "link_timeout_ms": 3000}
    )
    coordinator = Coordinator(RemoteTarget(target.address), RemoteDraft(draft.address), settings)
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.close()


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_token_ids=tuple(range(start, start + 60)),
            max_tokens=40,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.0),
        )
        for start in (3, 40, 90)
    ]


async def tokens_of(
    coordinator: Coordinator, has_drafted: asyncio.Event | None = None, **options: Any
) -> list[list[int]]:
    """``has_drafted`` is set once a request has begun to draft."""

    async def read(request: GenerationRequest) -> list[int]:
        token_ids: list[int] = []
        async for delta in coordinator.generate_stream(dataclasses.replace(request, **options)):
            token_ids += delta.token_ids
            if has_drafted is not None and len(token_ids) >= _DRAFTED_TOKENS:
                has_drafted.set()
        return token_ids

    async with asyncio.timeout(DEADLINE_S):
        return list(await asyncio.gather(*map(read, requests())))


async def plane_is(coordinator: Coordinator, plane: str) -> None:
    """Return when states would go by that plane."""
    async with asyncio.timeout(DEADLINE_S):
        while [str(report.kind) for report in coordinator.services.peers.planes.reports()] != [plane]:
            await asyncio.sleep(0.01)


async def assert_kills_change_nothing(
    plane: str, killed: Service, survivor: Service, num_kills: int, expected: list[list[int]] | None = None
) -> None:
    """``expected`` are the target's tokens; None: they are asked for first, without drafts."""
    draw = random.Random(num_kills)
    services = {service.role: service for service in (killed, survivor)}
    num_held: list[int] = []
    num_met = 0
    try:
        await asyncio.gather(killed.start(), survivor.start())
        async with coordinator_of(services["target"], services["draft"]) as coordinator:
            expected = expected or await tokens_of(coordinator, num_speculative_tokens=0)
            for _ in range(num_kills):
                await plane_is(coordinator, plane)
                num_held.append(survivor.num_descriptors())
                has_drafted = asyncio.Event()
                running = asyncio.create_task(tokens_of(coordinator, has_drafted))
                async with asyncio.timeout(DEADLINE_S):
                    await has_drafted.wait()
                await asyncio.sleep(draw.uniform(0.0, 0.05))
                num_met += not running.done()
                await killed.kill()
                await killed.start()
                assert await running == expected
            await plane_is(coordinator, plane)
            assert await tokens_of(coordinator) == expected
            assert stats_of(coordinator).num_failed == 0
            assert stats_of(coordinator).spec_stats.num_drafts > 0
            assert 2 * num_met >= num_kills, "most kills should meet requests that draft"
            await eventually(lambda: survivor.num_descriptors() <= num_held[0] + 2, "descriptors given back")
    finally:
        await asyncio.gather(killed.kill(), survivor.kill())


@pytest.mark.parametrize("num_kills", NUM_KILLS)
@pytest.mark.parametrize("victim", ["draft", "target"])
@pytest.mark.parametrize("plane", ["shared_memory", "gloo"])
async def test_either_side_is_killed_while_states_travel(
    tmp_path: Path, plane: str, victim: str, num_kills: int
) -> None:
    async with run_stack(TARGET, None, wire=False) as stack:
        expected = await tokens_of(stack.coordinator)
    target = Service("target", model=str(TARGET), tensor_plane=plane, max_batched_tokens=32)
    draft = Service("draft", model=str(build_eagle3(tmp_path)), method="eagle3", target_model=str(TARGET))
    killed, survivor = (draft, target) if victim == "draft" else (target, draft)
    await assert_kills_change_nothing(plane, killed, survivor, num_kills, expected)
    shared_file.sweep(
        shared_file.FOLDER
    )  # as the next service does: an owner may be killed before its file has lost its name
    await eventually(lambda: holdings()[2] == 0, "no file in shared memory")  # those of other tests go by themselves


@pytest.mark.gpu
@pytest.mark.parametrize("num_kills", GPU_KILLS)
@pytest.mark.parametrize("victim", ["draft", "target"])
@pytest.mark.parametrize(
    ("plane", "draft_device"), [("cuda_ipc", "cuda:0"), ("cuda_ipc", "cuda:1"), ("nccl", "cuda:1")]
)
async def test_either_side_is_killed_while_states_travel_between_gpus(
    tmp_path: Path, plane: str, draft_device: str, victim: str, num_kills: int
) -> None:
    if torch.cuda.device_count() <= int(draft_device[-1]):
        pytest.skip("there are too few GPUs")
    shared = {"dtype": "float32", "num_pages": 500, "cuda_graph_memory_mb": 0}
    target = Service("target", model=str(TARGET), tensor_plane=plane, max_batched_tokens=32, device="cuda:0", **shared)
    draft = Service(
        "draft", model=str(build_eagle3(tmp_path)), method="eagle3", target_model=str(TARGET), device=draft_device,
        **shared,
    )  # fmt: skip
    killed, survivor = (draft, target) if victim == "draft" else (target, draft)
    await assert_kills_change_nothing(plane, killed, survivor, num_kills)
