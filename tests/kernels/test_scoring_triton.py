"""The scoring kernels in the interpreter, in a file of their own: the tests of one file run one after the other."""

from __future__ import annotations

import pytest

from tests.kernels.test_triton import COMPILING, run

PATH = COMPILING.with_name("scoring_cases.py")


@pytest.mark.timeout(400)
def test_scoring_keeps_its_contract_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert " passed" in run("pytest", str(PATH), "-p", "no:cacheprovider", TRITON_INTERPRET="1")
