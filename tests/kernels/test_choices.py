"""Choices by device and size, which need no GPU: stages, shares of keys, and what PyTorch's libraries take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.kernels import launching
from outrider.kernels.fp8_linear.layout import Fp8Matrix, Rounding
from outrider.kernels.fp8_linear.library import library_takes
from outrider.kernels.paged_attention.device_plan import PagedRows, num_counters, share_keys

CPU = torch.device("cpu")


@pytest.mark.parametrize(("wanted", "stage_bytes", "expected"), [(4, 48 << 10, 4), (5, 48 << 10, 4), (3, 300 << 10, 1)])
def test_stages_are_those_that_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, wanted: int, stage_bytes: int, expected: int
) -> None:
    monkeypatch.setattr(launching, "shared_bytes", lambda _: 227 << 10)
    assert launching.stages_within(wanted, stage_bytes, CPU) == expected


@pytest.mark.parametrize(
    ("capability", "version", "widest"), [((9, 0), 91_002, 256), ((9, 0), 90_100, 128), ((8, 0), 91_002, 128)]
)
def test_heads_that_the_library_lacks_are_left_to_the_other_kernels(
    capability: tuple[int, int], version: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "needs triton"
    prompts = pytest.importorskip("outrider.kernels.paged_attention.prompts", reason=reason, exc_type=ImportError)
    takes_heads = prompts.takes_heads
    takes_heads.cache_clear()
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert [size for size in (64, 80, 84, 128, 256, 512) if takes_heads(size, device)] == [
        size for size in (64, 80, 128, 256) if size <= widest
    ]
    takes_heads.cache_clear()


PROCESSORS = 132


@pytest.mark.parametrize(
    ("num_rows", "max_queries", "budget"), [(32, 1, 33), (33, 1, 66), (64, 1, 66), (65, 1, 33), (40, 8, 33), (1, 1, 33)]
)
def test_shares_are_half_as_long_where_whole_ones_are_uneven(num_rows: int, max_queries: int, budget: int) -> None:
    numbers = torch.zeros(num_rows + 1, dtype=torch.int32)
    rows = PagedRows(numbers, numbers[1:], numbers, numbers, max_queries, numbers)
    sharing = share_keys(
        rows, num_tokens=num_rows * max_queries, num_heads=32, num_kv_heads=8, head_dim=128,
        dtype=torch.bfloat16, num_processors=PROCESSORS,
    )  # fmt: skip
    assert sharing.budget == budget
    # A tile is cut from one and a half shares on, so that so many tiles can be cut, for each of 8 heads.
    assert 8 * sharing.budget / 1.5 <= num_counters(PROCESSORS)


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
