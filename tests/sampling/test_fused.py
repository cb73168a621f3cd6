"""Checks of the kernels' results before a session is answered."""

from __future__ import annotations

import math

import pytest

from outrider.sampling.scoring.fused import _is_drawable


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e31])
@pytest.mark.parametrize("place", range(3))
def test_one_bad_row_is_seen_wherever_it_stands(bad: float, place: int) -> None:
    largest = [1.0, -2.0, 3.0]
    assert _is_drawable(largest, 1e30)
    largest[place] = bad
    assert not _is_drawable(largest, 1e30)
