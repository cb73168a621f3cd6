"""Distribution of the keys of decoding batches over programs."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.paged_attention.device_plan import PagedRows, num_counters, share_keys

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
