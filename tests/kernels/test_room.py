"""Memory behind the rows of activations."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.linear.selection import gate_tiling, library_rows, split_tiling, stream_k_tiling
from outrider.kernels.room import empty_rows, with_room

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [0, 1, 9, 40, 96, 97, 200, 320, 384, 500])
def test_rows_have_room_for_the_tiles_of_every_table(num_rows: int) -> None:
    x = empty_rows(num_rows, 8, dtype=torch.bfloat16, device=CPU)
    assert x.shape == (num_rows, 8)
    assert x.is_contiguous()
    for tiling in (
        split_tiling(num_rows, 2),
        split_tiling(num_rows, 4),
        stream_k_tiling(num_rows),
        gate_tiling(num_rows),
    ):
        wanted = num_rows if tiling is None else tiling.groups_of(num_rows) * (tiling.width + tiling.rest)
        assert with_room(x, wanted).shape == (wanted, 8)
    assert with_room(x, library_rows(num_rows)).shape == (library_rows(num_rows), 8)


def test_room_is_the_memory_behind_the_rows() -> None:
    x = empty_rows(40, 8, dtype=torch.float32, device=CPU)
    wide = with_room(x, 64)
    wide.copy_(torch.arange(64.0)[:, None].expand(64, 8))
    assert torch.equal(x, wide[:40])
    assert wide.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "x", [torch.zeros(40, 8), torch.zeros(8, 64).T[:40], torch.zeros(64, 8)[10:50], torch.zeros(64, 16)[:40, :8]]
)
def test_rows_without_room_stay_as_they_are(x: torch.Tensor) -> None:
    assert with_room(x, 64) is x


def test_rows_that_are_there_need_no_room() -> None:
    x = empty_rows(40, 8, dtype=torch.float32, device=CPU)
    assert with_room(x, 40) is x
