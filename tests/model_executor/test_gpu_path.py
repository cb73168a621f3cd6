"""All that a GPU does between a service's step and its answer, done by the same code on a CPU.

Triton interprets the kernels there, and what would be captured as a graph is launched. Answers must be those of the
plain way through PyTorch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
REALS = {"support_probs", "outside_mass", "probs", "entropies"}
RunningBatch = tuple["subprocess.Popen[str]", Path]


def start(device: str, path: Path, *arguments: str, **environment: str) -> RunningBatch:
    """Processes of their own: Triton decides when it is imported whether it interprets."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.model_executor.gpu_path", device, str(path), *arguments],
        cwd=ROOT, env={**plain, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return process, path


def finish(started: RunningBatch) -> dict[str, Any]:
    process, path = started
    said, _ = process.communicate()
    assert process.returncode == 0, said[-4000:]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def check(found: dict[str, Any], truth: dict[str, Any]) -> None:
    check_answers(found, truth)
    check_arrays(found, truth)
    _agree(found["drafts"], truth["drafts"])
    assert found["texts"] == truth["texts"]
    np.testing.assert_allclose(found["narrow"], truth["narrow"], rtol=2e-2, atol=2e-2)


def check_answers(found: dict[str, Any], truth: dict[str, Any]) -> None:
    _agree(found["answers"], truth["answers"])
    assert found["draft_steps"] < truth["draft_steps"]  # for whole proposals are drawn in one


def check_arrays(found: dict[str, Any], truth: dict[str, Any]) -> None:
    _agree(found["columns"], truth["columns"])


def _agree(found: Sequence[dict[str, Any]], truth: Sequence[dict[str, Any]]) -> None:
    assert len(found) == len(truth) > 0
    for ours, expected in zip(found, truth, strict=True):
        assert ours.keys() == expected.keys()
        for name, values in expected.items():
            if name in REALS:
                np.testing.assert_allclose(ours[name], values, rtol=1e-3, atol=1e-6)
            else:
                assert ours[name] == values, name


@pytest.mark.integration
def test_the_way_of_a_gpu_gives_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    interpreted = start("cpu", tmp_path / "interpreted", TRITON_INTERPRET="1")
    plain = start("cpu", tmp_path / "plain")
    check(finish(interpreted), finish(plain))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_gives_the_same_answers(tmp_path: Path) -> None:
    on_gpu, plain = start("cuda", tmp_path / "on_gpu"), start("cpu", tmp_path / "plain")
    check(finish(on_gpu), finish(plain))
