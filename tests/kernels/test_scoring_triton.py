"""The contracts of the scoring kernels, in a file of their own: those of one file run one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_triton import COMPILING, run

PATH = COMPILING.with_name("scoring_cases.py")


@pytest.mark.timeout(400)
def test_scoring_keeps_its_contract_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert " passed" in run("pytest", str(PATH), "-p", "no:cacheprovider", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(600)
def test_scoring_keeps_its_contract_on_a_gpu() -> None:
    assert " passed" in run("pytest", str(PATH), "-p", "no:cacheprovider")
