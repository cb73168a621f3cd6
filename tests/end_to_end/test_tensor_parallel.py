"""Models that several processes share: the same tokens as alone, and one end for all when one of them is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.probe import is_serving
from tests.end_to_end.commands import DEADLINE_S, wait_until
from tests.end_to_end.test_direct_proposals import PATIENT, introduced
from tests.end_to_end.test_draft_ahead import steps
from tests.end_to_end.waiting import again_until
from tests.support.processes import arguments, children, is_alive
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "acceptance_method": "coupled", "seed": 3},
    {"temperature": 0.8, "acceptance_method": "rejection", "seed": 4},
)
_alone: list[tuple[int, ...]] = []


async def tokens(target_size: int, draft_size: int, draft_ahead: str) -> list[tuple[int, ...]]:
    model = cached_tiny_model("qwen3", seed=1)
    async with run_stack(
        model,
        cached_tiny_model("qwen3", seed=1, num_hidden_layers=1),
        wire=True,
        target_settings={"device": "cpu", "tensor_parallel_size": target_size},
        draft_settings={"device": "cpu", "tensor_parallel_size": draft_size},
        draft_ahead=draft_ahead,
        **PATIENT,
    ) as stack:
        assert stack.draft is not None
        await introduced(stack)
        for service, size in ((stack.target, target_size), (stack.draft, draft_size)):
            assert (await service.describe()).tensor_parallel_size == size
        found = list[tuple[int, ...]]()

        async def play() -> None:
            asked = {"prompt_token_ids": [5, 6, 7, 8, 9], "max_tokens": 40, "ignore_eos": True}
            results = [await stack.generate(**asked, **request) for request in REQUESTS]
            assert all(result.speculation.num_draft_tokens for result in results)
            found[:] = [result.token_ids for result in results]

        def is_ahead() -> bool:
            return draft_ahead == "in_turn" or steps(stack, "used") + steps(stack, "unused") > 0

        await again_until(is_ahead, play)
        assert is_ahead()
    return found


@pytest.mark.parametrize("draft_ahead", ["verdict", "chain"])
@pytest.mark.parametrize(("target_size", "draft_size"), [(2, 1), (1, 2)])
async def test_tokens_are_those_of_one_process_each(target_size: int, draft_size: int, draft_ahead: str) -> None:
    if not _alone:
        _alone.extend(await tokens(1, 1, "in_turn"))
    assert await tokens(target_size, draft_size, draft_ahead) == _alone


class Shared:
    """A target that two processes share, as a user starts it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def follower(self) -> int:
        """The other rank's process; beside it there may be some that poll CPUs busily."""
        own, found = arguments(self.process.pid), children(self.process.pid)
        (rank,) = [pid for pid in found if "outrider_target" in arguments(pid) != own]
        return rank

    def end(self) -> tuple[int, str]:
        """Exit code and all that was said, once it has ended."""
        said = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, said


@contextmanager
def shared_target(*flags: str) -> Iterator[Shared]:
    port = hold_port()
    command = [
        *(
            sys.executable,
            "-P",
            "-m",
            "outrider_target",
            "--model",
            str(cached_tiny_model("llama")),
            "--port",
            str(port),
        ),
        *(
            "--num-threads",
            "1",
            "--device",
            "cpu",
            "--num-pages",
            "20",
            "--drain-delay-s",
            "0",
            "--tensor-parallel-size",
            "2",
            *flags,
        ),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Shared(process, f"127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")],
        ),
    ],
)
@pytest.mark.parametrize("ending", ["follower killed", "rank 0 killed", "rank 0 told to stop"])
def test_all_ranks_end_when_one_does(ending: str, device: str) -> None:
    with shared_target("--device", device) as target:
        wait_until(
            lambda: asyncio.run(is_serving(target.address, waits=True)) or target.process.poll() is not None, "serving"
        )
        assert target.process.poll() is None, target.end()
        follower = target.follower()
        os.kill(
            follower if ending == "follower killed" else target.process.pid,
            signal.SIGTERM if ending == "rank 0 told to stop" else signal.SIGKILL,
        )
        code, said = target.end()
        wait_until(lambda: not is_alive(follower), "the end of the other rank", said)
    assert code == {"follower killed": 1, "rank 0 killed": -signal.SIGKILL, "rank 0 told to stop": 0}[ending], said
    if ending == "follower killed":
        assert "rank 1 of 2 was killed by SIGKILL; the service ends with it" in said
    assert "Traceback" not in said


def test_a_rank_that_cannot_load_is_told_by_rank_0(tmp_path: Path) -> None:
    """Sizes that do not divide are refused before any process is started."""
    with shared_target("--tensor-parallel-size", "3") as target:
        code, said = target.end()
    assert code == 1
    assert "error: --tensor-parallel-size: 3 does not fit this model" in said
