"""The order of rows, for every shape: one row, one wanted, all wanted."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.ordering import largest, largest_of_blocks


def best_first(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_the_largest_of_any_shape(num_rows: int, width: int) -> None:
    values = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(num_rows))
    values[:, 9] = values[:, 3]  # equals: the lower id first
    ordered, token_ids = largest(values, width)
    by_hand = [best_first(row)[:width] for row in values.tolist()]
    assert token_ids.tolist() == by_hand
    assert torch.equal(ordered, values.gather(-1, token_ids))


@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_largest_of_blocks_are_the_largest(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(-9, 9, (40, 64 * 20), generator=generator).float()  # most are equal to others
    values[1] = -torch.inf
    values[2, 200:] = -torch.inf
    for found, expected in zip(largest_of_blocks(values, width), largest(values, width), strict=True):
        assert torch.equal(found, expected)
