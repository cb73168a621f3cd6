"""Softmax and sums of rows: right, and of the same bits whatever rows there are besides."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.softmax import aligned_rows, log_softmax_rows, row_sums, softmax_rows, sum_halves


def rows_of(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(size)) * 3


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 32_001])
def test_halves_add_up_to_the_sum_of_each_row_alone(size: int) -> None:
    rows = rows_of(9, size)
    before = rows.clone()
    found = sum_halves(rows)
    torch.testing.assert_close(found.double(), rows.double().sum(-1), rtol=1e-5, atol=1e-3)
    assert torch.equal(torch.cat([sum_halves(row[None]) for row in rows]), found)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("size", [5, 8, 32_001])
def test_every_row_begins_aligned(size: int) -> None:
    whole = rows_of(4, size)
    for rows in (whole, whole[1:3]):
        aligned = aligned_rows(rows)
        assert all(row.data_ptr() % 16 == 0 for row in aligned)
        assert torch.equal(aligned[:, :size], rows)
        assert (aligned[:, size:] == float("-inf")).all()
        torch.testing.assert_close(aligned.softmax(-1)[:, :size], softmax_rows(rows))
        torch.testing.assert_close(aligned.log_softmax(-1)[:, :size], log_softmax_rows(rows))


def test_long_rows_are_split_in_the_same_places() -> None:
    rows = rows_of(3, 20_003).softmax(-1)
    torch.testing.assert_close(row_sums(rows), torch.ones(3))
    assert torch.equal(torch.cat([row_sums(row[None]) for row in rows]), row_sums(rows))
