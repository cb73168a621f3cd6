"""The kernels of scoring and of batch invariance in the interpreter: tests of one file run one after the other."""

from __future__ import annotations

import pytest

from tests.kernels.test_triton import interpret


@pytest.mark.timeout(900)
def test_scoring_and_invariance_keep_their_contracts_in_the_interpreter() -> None:
    interpret(("scoring_cases", "invariance_cases"))
