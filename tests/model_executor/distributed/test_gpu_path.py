"""Steps queued ahead and draft loops of a model that two ranks share: the answers are those of one process.

On a CPU Triton interprets the kernels and ranks sum by gloo; on GPUs graphs are captured and ranks sum by NCCL or
symmetric memory. Whole models on two GPUs say what they say on one, whichever way they sum.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.stack.held_ports import hold_port
from tests.end_to_end.commands import wait_until
from tests.model_executor.test_gpu_path import ROOT, check_answers, check_arrays, finish, start
from tests.support.processes import is_alive

DEADLINE_S = 800
"""Two ranks take 25 s of a processor, in the interpreter; a busy machine gives them a tenth of one."""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")],
    ),
]
INTERPRETED = {"cpu": {"TRITON_INTERPRET": "1"}, "cuda": {}}
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Truth: results of one process, through PyTorch."""
    return finish(start("cpu", tmp_path_factory.mktemp("alone") / "plain"))


def said_by_two(device: str, path: Path, shared: str) -> dict[str, Any]:
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hold_port()), **INTERPRETED[device]}
    ranks = [start(device, path, shared, RANK=rank, LOCAL_RANK=rank, **group) for rank in ("0", "1")]
    try:
        ended = [process.communicate(timeout=DEADLINE_S)[0] for process, _ in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
    assert [process.returncode for process, _ in ranks] == [0, 0], "\n".join(said[-4000:] for said in ended)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_a_shared_target_queues_ahead(device: str, truth: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = said_by_two(device, tmp_path / "said", "target")
    assert found["texts"] == truth["texts"]
    check_arrays(found, truth)


@pytest.mark.parametrize("device", DEVICES)
def test_loops_of_a_shared_draft(device: str, truth: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    check_answers(said_by_two(device, tmp_path / "said", "draft"), truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lost", ["0", "1"])
def test_all_ranks_end_when_one_is_lost_at_a_queued_step(lost: str, device: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.model_executor.distributed.lost_rank", device, lost]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **INTERPRETED[device]}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    follower, *rest = process.stdout.split()
    wait_until(lambda: not is_alive(int(follower)), "the end of the other rank", process.stderr)
    assert not rest, "the step went on without a rank"
    assert process.returncode == (-signal.SIGKILL if lost == "0" else 1), process.stderr
    if lost == "1":
        assert "rank 1 of 2 was killed by SIGKILL; the service ends with it" in process.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
@pytest.mark.parametrize("flags", [("one_shot", "captured"), ("captured",), ("one_shot",)])
def test_greedy_tokens_are_those_of_one_gpu(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "said.pt"
    command = [sys.executable, "-W", "ignore", "-m", "tests.model_executor.distributed.on_two_gpus", str(path), *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    (alone, expected), (shared, logits) = torch.load(path)
    assert shared == alone
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
