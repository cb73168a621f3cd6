"""Launch options."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import launching

CPU = torch.device("cpu")


@pytest.mark.parametrize(("wanted", "stage_bytes", "expected"), [(4, 48 << 10, 4), (5, 48 << 10, 4), (3, 300 << 10, 1)])
def test_stages_are_those_that_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, wanted: int, stage_bytes: int, expected: int
) -> None:
    monkeypatch.setattr(launching, "shared_bytes", lambda _: 227 << 10)
    assert launching.stages_within(wanted, stage_bytes, CPU) == expected
