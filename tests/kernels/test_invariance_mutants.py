"""Seeded mistakes in batch-invariant kernels are found by the cases that compare bits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.invariance_mutants import MUTANTS, run


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.is_interpreted])
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
