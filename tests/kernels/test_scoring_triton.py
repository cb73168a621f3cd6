"""The kernels of scoring and of batch invariance in the interpreter, and mistakes seeded in them.

A file beside ``test_triton.py``, for tests of one file run one after the other.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.invariance_mutants import MUTANTS, run
from tests.kernels.test_triton import interpret

OF_EVERY_RUN = {
    "parts-follow-tiles", "atomic-add-of-parts", "segments-follow-the-division", "model-with-library-products",
    "fp8-split-follows-rows", "noise-follows-the-row",
}  # fmt: skip
"""One mistake in each kernel; a process of seconds seeks each, so the others are slow tests."""


def test_scoring_and_invariance_keep_their_contracts_in_the_interpreter() -> None:
    interpret(("scoring_cases", "invariance_cases"))


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_EVERY_RUN else pytest.mark.slow)
        for name, mutant in MUTANTS.items()
        if mutant.is_interpreted
    ],
)
def test_mistakes_are_found_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    is_found, told = run(name, interpret=True)
    assert is_found, told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mistakes_are_found_on_a_gpu(name: str) -> None:
    is_found, told = run(name, interpret=False)
    assert is_found, told
