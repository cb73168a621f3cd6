"""EAGLE, MTP and DFlash through the kernels of a GPU, interpreted on a CPU: their drafts are those of the papers.

The test runs this file as a module with ``TRITON_INTERPRET=1``: whether Triton interprets is decided at its import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.draft_service.head_rig import Checked, Reference, options, served
from tests.support.dflash import DFlashReference, build_dflash
from tests.support.hybrid_mtp import HybridMtpReference, build_hybrid_mtp
from tests.support.pair_heads import EagleReference, MtpReference, build_eagle, build_mimo
from tests.support.quick_interpreter import set_up_quick_interpreter
from tests.support.tiny_models import cached_tiny_model

ROOT = Path(__file__).parents[2]


def check(method: str, head: Path, target: Path, reference: Reference) -> None:
    rig = Checked(served(method, head, target), reference, target)
    rig.generate([options(2, 9, max_tokens=4), options(1, 3, max_tokens=4)])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    set_up_quick_interpreter()
    target = cached_tiny_model("llama", seed=1)
    eagle, dflash = build_eagle(folder / "eagle", bias=True), build_dflash(folder / "dflash")
    mimo = build_mimo(folder / "mimo")
    check("eagle", eagle, target, EagleReference(eagle, target))
    check("dflash", dflash, target, DFlashReference(dflash, target))
    check("mtp", mimo, mimo, MtpReference(mimo, cached_tiny_model("qwen2", seed=1)))
    hybrid = build_hybrid_mtp(folder / "hybrid", "qwen3_next")
    check("mtp", hybrid, hybrid, HybridMtpReference(hybrid))


@pytest.mark.slow
def test_drafts_through_kernels_are_those_of_the_papers(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.draft_service.test_heads_on_kernels", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
