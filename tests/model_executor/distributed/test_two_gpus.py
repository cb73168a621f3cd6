"""A model that two GPUs share says what it says on one, whichever way they sum. Skipped where there are not two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]


@pytest.mark.parametrize("flags", [("one_shot", "captured"), ("captured",), ("one_shot",)])
def test_greedy_tokens_are_those_of_one_gpu(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "said.pt"
    command = [sys.executable, "-W", "ignore", "-m", "tests.model_executor.distributed.on_two_gpus", str(path), *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    (alone, expected), (shared, logits) = torch.load(path)
    assert shared == alone
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
