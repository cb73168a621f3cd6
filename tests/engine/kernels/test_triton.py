"""The Triton kernels, each run in the interpreter, compiled for real hardware, and run on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = ["triton_cases", "draft_sampling_cases", "few_tokens_cases", "scoring_cases"]
COMPILING = Path(__file__).with_name("compiling.py")


def run(*command: str, **environment: str) -> str:
    """A process of its own: Triton decides when it is imported whether it interprets."""
    plain = {name: value for name, value in os.environ.items() if name not in {"TRITON_INTERPRET", "PYTEST_ADDOPTS"}}
    outcome = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=COMPILING.parents[3], env={**plain, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-2000:]
    return outcome.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cases", CASES)
def test_kernels_keep_their_contracts_in_the_interpreter(cases: str) -> None:
    pytest.importorskip("triton")
    path = COMPILING.with_name(f"{cases}.py")
    assert " passed" in run("pytest", str(path), "-p", "no:cacheprovider", TRITON_INTERPRET="1")


def test_kernels_compile_for_real_hardware() -> None:
    """No GPU needed. Every launch that a dense and a normalised model make, for two generations of hardware."""
    pytest.importorskip("triton")
    lines = run("tests.engine.kernels.compiling").splitlines()
    compiled = {tuple(line.split()[:2]) for line in lines}
    names = {"_norm_kernel", "_swiglu_kernel", "_turn_and_store_kernel", "_attend_kernel", "_skinny_kernel"}
    names |= {"_survey_kernel", "_histogram_kernel", "_gather_kernel", "_finish_kernel"}
    names |= {"_product_kernel", "_gated_kernel", "_turned_kernel", "_look_up_kernel"}
    names |= {"_sum_norm_kernel"}
    names |= {"_mark_kernel", "_group_kernel", "_entropy_kernel", "_answer_kernel"}
    names |= {"_tops_kernel", "_level_kernel", "_collect_kernel", "_select_kernel"}
    assert compiled == {(name, capability) for name in names for capability in ("80", "90")}
    # Dependent launch exists from 9.0 on, and there every kernel must wait for the one before it.
    assert {line.split()[1]: line.split()[2] for line in lines} == {"80": "False", "90": "True"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(600)
def test_kernels_keep_their_contracts_on_a_gpu() -> None:
    paths = [str(COMPILING.with_name(f"{cases}.py")) for cases in CASES]
    assert " passed" in run("pytest", *paths, "-p", "no:cacheprovider")
