"""The KV cache and a naive model do the same under random operations."""

from __future__ import annotations

import pytest

from tests.kv_cache.random_operations import REACH, WINDOW, RandomOperations


@pytest.mark.parametrize(("seed", "num_operations"), [(1, 10_000), pytest.param(2, 100_000, marks=pytest.mark.slow)])
def test_cache_and_naive_model_agree(seed: int, num_operations: int) -> None:
    operations = RandomOperations(seed)
    operations.run(num_operations)
    counts = operations.counts
    assert min(counts["hits"], counts["misses"], counts["copies"], counts["out of pages"]) > num_operations / 200
    assert operations.model.num_evicted > num_operations / 200
    assert min(counts["shared together"], counts["out of pages together"]) > num_operations / 1000


@pytest.mark.parametrize(("seed", "num_operations"), [(3, 10_000), pytest.param(4, 100_000, marks=pytest.mark.slow)])
def test_they_agree_where_pages_that_leave_a_window_are_given_back(seed: int, num_operations: int) -> None:
    operations = RandomOperations(seed, reach=REACH)
    operations.run(num_operations)
    counts = operations.counts
    assert min(counts["hits"], counts["copies"], counts["given back"]) > num_operations / 200
    assert counts["kept"], "no truncation met pages that were given back"


@pytest.mark.parametrize(("seed", "num_operations"), [(5, 10_000), pytest.param(6, 100_000, marks=pytest.mark.slow)])
def test_they_agree_where_some_layers_have_window_pages(seed: int, num_operations: int) -> None:
    operations = RandomOperations(seed, window=WINDOW)
    operations.run(num_operations)
    counts = operations.counts
    assert min(counts["hits"], counts["copies"], counts["given back"], counts["left window"]) > num_operations / 400
    assert min(counts["kept"], counts["out of window pages"]) > num_operations / 1000
