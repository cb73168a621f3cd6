"""FP8 products that PyTorch's library takes, by weight, GPU and CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.kernels.fp8_linear.layout import Fp8Matrix, Rounding
from outrider.kernels.fp8_linear.library import library_takes

SIZE = 512


def weight(columns: int) -> Fp8Matrix:
    rows = 128 if columns < SIZE else 1
    numbers: Any = SimpleNamespace(shape=(256, SIZE), device=torch.device("cuda", 0))
    return Fp8Matrix(numbers, torch.ones(256 // rows, SIZE // columns), rows, columns)


@pytest.mark.parametrize(
    ("capability", "cuda", "takes_blocks"),
    [((9, 0), "12.9", True), ((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)],
)
def test_scales_of_blocks_are_for_hopper_and_a_new_library(
    capability: tuple[int, int], cuda: str, takes_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert library_takes(weight(128), Rounding(128), torch.bfloat16) == takes_blocks
    assert library_takes(weight(SIZE), Rounding(SIZE), torch.bfloat16)
    assert not library_takes(weight(SIZE), Rounding(SIZE), torch.float16)
