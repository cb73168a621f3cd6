"""The Triton kernels, each run in the interpreter and compiled for real hardware. ``conftest.py`` has them on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CASES = [
    ("triton_cases", "draft_sampling_cases", "gemv_cases", "fp8_cases"),
    ("experts_cases", "gated_delta_cases", "fp8_cache_cases"),
]
"""Files of cases by process: a process takes seconds to start. ``test_scoring_triton`` has two more."""
KERNELS = {
    "_norm_kernel", "_swiglu_kernel", "_rope_and_cache_kernel", "_attend_kernel", "_schedule_kernel",
    "_attend_chunks_kernel", "_join_kernel", "_attend_segments_kernel", "_segment_schedule_kernel", "_ordered_kernel",
    "_skinny_kernel", "_look_up_kernel", "_reduce_kernel", "_histogram_kernel", "_gather_kernel", "_finish_kernel",
    "_split_k_kernel", "_split_k_gate_kernel", "_stream_k_kernel", "_sum_partials_kernel",
    "_product_kernel", "_gated_kernel", "_qkv_rope_kernel", "_sum_norm_kernel", "_norm_and_round_kernel",
    "_copy_inputs_kernel", "_advance_kernel", "_group_kernel", "_entropy_kernel", "_answer_kernel", "_cut_kernel",
    "_round_kernel", "_fp8_kernel", "_route_kernel", "_tile_kernel", "_grouped_kernel", "_delta_kernel", "_log_kernel",
    "_convolve_kernel", "_gated_norm_kernel", "_chunk_kernel", "_follow_kernel", "_mask_kernel", "_store_kernel",
}  # fmt: skip
COMPILING = Path(__file__).with_name("compiling.py")


def run(*command: str, **environment: str) -> str:
    """A process of its own: Triton decides when it is imported whether it interprets."""
    plain = {name: value for name, value in os.environ.items() if name not in {"TRITON_INTERPRET", "PYTEST_ADDOPTS"}}
    outcome = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=COMPILING.parents[2], env={**plain, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-2000:]
    return outcome.stdout


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0])
def test_kernels_keep_their_contracts_in_the_interpreter(cases: Sequence[str]) -> None:
    interpret(cases)


@pytest.mark.integration
def test_whole_models_keep_their_answers_in_the_interpreter() -> None:
    interpret(["gated_delta_cases"], tier="integration")


def interpret(cases: Sequence[str], tier: str = "not integration") -> None:
    pytest.importorskip("triton")
    paths = [str(COMPILING.with_name(f"{name}.py")) for name in cases]
    assert " passed" in run("pytest", *paths, "-m", tier, "-p", "no:cacheprovider", TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    ("module", "waits"), [("compiling", "False"), pytest.param("compiling_uses", "True", marks=pytest.mark.integration)]
)
def test_kernels_compile_for_real_hardware(module: str, waits: str) -> None:
    """No GPU needed. Once by hand for capability 8.0, and as whole models launch them for 9.0.

    Dependent launch exists from 9.0 on, and there every kernel must wait for the one before it. Without the lines of
    source in its output the compiler takes a seventh less.
    """
    pytest.importorskip("triton")
    output = run(f"tests.kernels.{module}", TRITON_DISABLE_LINE_INFO="1")
    lines = [line.split() for line in output.splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    assert {line[1] for line in lines} == {waits}


def test_products_of_one_step_begin_with_zero() -> None:
    """No GPU needed; the interpreter adds as the source says, whatever the compiler makes of it."""
    pytest.importorskip("triton")
    assert run("tests.kernels.separate_sums").splitlines() == 2 * ["arith.constant"]
