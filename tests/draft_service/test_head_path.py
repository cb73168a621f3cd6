"""Draft loops of heads, and hidden states out of captured forwards, against the plain way through PyTorch: on a CPU
where Triton interprets the same code, and on a GPU, where there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def start(device: str, path: Path, **environment: str) -> subprocess.Popen[str]:
    """A process of its own: Triton decides when it is imported whether it interprets."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.draft_service.head_path", device, str(path)],
        cwd=ROOT, env={**plain, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def compare(tmp_path: Path, device: str, **environment: str) -> None:
    started = {
        "found": start(device, tmp_path / "found", **environment),
        "truth": start("cpu", tmp_path / "truth", SMALL=environment.get("SMALL", "")),
    }
    results: dict[str, Any] = {}
    for name, process in started.items():
        said, _ = process.communicate()
        assert process.returncode == 0, said[-4000:]
        results[name] = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    found, truth = results["found"], results["truth"]
    for head in ("reduced", "blocks", "whole") if "whole" in truth else ("reduced", "blocks"):
        for part in ("said", "drafted", "ids"):
            assert found[head][part] == truth[head][part], (head, part)
        assert any(len(draft) > 3 for draft in truth[head]["drafted"])
        assert truth[head]["probs"]
        for ours, expected in zip(found[head]["probs"], truth[head]["probs"], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-6)
    for ours, expected in zip(found["states"], truth["states"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_loops_and_captured_states_are_those_of_the_plain_way(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compare(tmp_path, "cpu", TRITON_INTERPRET="1", SMALL="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_drafts_and_hands_out_the_same(tmp_path: Path) -> None:
    compare(tmp_path, "cuda")
