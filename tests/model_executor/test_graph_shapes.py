"""Shapes that are captured, the shape of a batch, and the memory of all; none of it needs a GPU."""

from __future__ import annotations

import pytest

from outrider.model_executor.device_inputs import BatchShape
from outrider.model_executor.graph_capture import CaptureBound, CaptureLimits, NoGraphs
from outrider.model_executor.graph_shapes import (
    DEFAULT_LIMITS,
    GraphLimits,
    choose_shape,
    forward_shapes,
    padded_size,
    padded_sizes,
)

SHAPES = forward_shapes(DEFAULT_LIMITS, has_chunks=True)
MIB = 1 << 20


def test_sizes_come_in_steps_that_grow_with_them() -> None:
    sizes = padded_sizes(1024)
    assert sizes[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert sizes[-1] == 1024
    assert 96 in sizes
    assert all(0 <= padded_size(size, 1024) - size <= max(7, size / 4, 31) for size in range(1, 1025))
    assert all(padded_size(size, 1024) <= size * 9 / 8 for size in range(128, 1025))


@pytest.mark.parametrize("most", [1, 3, 50, 100, 1024, 1500])
def test_the_most_is_a_size_whatever_it_is(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes[-1] == most
    assert sorted(set(sizes)) == list(sizes)
    assert padded_size(most + 1, most) == most + 1


@pytest.mark.parametrize("num_rows", [1, 2, 3, 17, 33, 64, 65, 128, 129, 250, 256])
@pytest.mark.parametrize("num_queries", [1, 2, 5, 8, 9, 16, 17])
def test_decoding_and_scoring_have_a_graph_with_little_padding(num_rows: int, num_queries: int) -> None:
    num_tokens = num_rows * num_queries
    chosen = choose_shape(BatchShape(num_rows, num_tokens, num_queries), SHAPES)
    if num_tokens > 1024:
        assert chosen is None
        return
    assert chosen is not None
    if num_queries <= 8:
        assert num_tokens <= chosen.num_tokens <= padded_size(num_tokens, 1024)
        assert chosen.max_queries <= 8
    else:
        assert chosen.num_tokens - num_tokens < max(16, num_tokens / 3)
        assert chosen.max_queries <= 17


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5, 8, 9])
def test_what_is_asked_for_most_has_a_shape_of_its_own(num_rows: int, num_queries: int) -> None:
    num_tokens = num_rows * num_queries
    chosen = choose_shape(BatchShape(num_rows, num_tokens, num_queries), SHAPES)
    assert chosen is not None
    assert (chosen.num_rows, chosen.num_tokens) == (num_rows, num_tokens)


def test_rows_of_uneven_drafts_have_a_graph() -> None:
    """Sixty rows without drafts beside four with eight tokens."""
    assert choose_shape(BatchShape(64, 60 + 4 * 9, 9), SHAPES) == BatchShape(112, 112, 17)
    assert choose_shape(BatchShape(200, 199 + 5, 5), SHAPES) == BatchShape(208, 208, 8)


def test_prompts_beside_decoding_rows_have_a_graph_whatever_their_chunk() -> None:
    for num_rows, chunk in ((1, 18), (1, 512), (33, 256), (65, 300), (257, 400)):
        own = BatchShape(num_rows, chunk + num_rows - 1, chunk)
        chosen = choose_shape(own, SHAPES)
        if num_rows > DEFAULT_LIMITS.max_sequences:
            assert chosen is None
        else:
            assert chosen is not None
            assert chosen.num_tokens - own.num_tokens <= max(32, own.num_tokens // 8)


def test_shapes_follow_the_limits() -> None:
    plain = forward_shapes(GraphLimits(max_sequences=40, max_draft_length=0, max_tokens=200), has_chunks=True)
    assert {shape.max_queries for shape in plain if shape.max_queries <= 17} == {1}
    assert max(shape.num_rows for shape in plain) == 40
    assert max(shape.num_tokens for shape in plain) == 200
    four = forward_shapes(GraphLimits(max_sequences=64, max_draft_length=4), has_chunks=True)
    scoring = [shape for shape in four if 1 < shape.max_queries <= 17]
    assert max(shape.num_tokens for shape in scoring) == 64 * 5
    assert {shape.max_queries for shape in scoring if shape.num_tokens > 8} == {8}
    nine = forward_shapes(GraphLimits(max_sequences=8, max_draft_length=8), has_chunks=True)
    assert choose_shape(BatchShape(1, 9, 9), nine) == BatchShape(1, 9, 9)
    assert choose_shape(BatchShape(2, 16, 9), nine) == BatchShape(8, 16, 9)
    large = forward_shapes(GraphLimits(max_sequences=600, max_draft_length=40), has_chunks=True)
    assert choose_shape(BatchShape(600, 600, 1), large) == BatchShape(600, 600, 1)
    assert choose_shape(BatchShape(2, 82, 41), large) == BatchShape(96, 96, 96)


def test_there_are_some_dozens_of_shapes() -> None:
    assert len(set(SHAPES)) == len(SHAPES) < 150
    assert [shape.num_tokens for shape in SHAPES] == sorted((shape.num_tokens for shape in SHAPES), reverse=True)
    prompts = forward_shapes(GraphLimits(decodes=False), has_chunks=True)
    assert len(prompts) < 30
    assert set(prompts) <= set(SHAPES)
    tiled = forward_shapes(GraphLimits(decodes=False), has_chunks=False)
    assert max((shape.num_rows, shape.num_tokens) for shape in tiled) == (64, 512)


def test_no_shapes_hold_nothing() -> None:
    assert choose_shape(BatchShape(1, 1, 1), ()) is None


def test_ranks_count_by_the_lowest_limit_and_the_largest_buffers() -> None:
    others = {"limit": 100 * MIB, "buffers": -80 * MIB}
    asked = iter(others)
    bound = CaptureBound(CaptureLimits(200 * MIB), 2, lambda own: min(own, others[next(asked)]))
    assert bound.most_of_ranks(20 * MIB) == 80 * MIB
    assert bound.admits(80 * MIB)
    assert not bound.admits(120 * MIB)
    assert next(asked, None) is None


def test_one_rank_and_no_limit_ask_nobody() -> None:
    assert CaptureBound(CaptureLimits(200 * MIB), 2).most_of_ranks(20 * MIB) == 20 * MIB
    assert CaptureBound(CaptureLimits(), 2, lambda own: own // 0).most_of_ranks(20 * MIB) == 20 * MIB


def test_the_largest_graphs_are_left_out_where_memory_is_bounded() -> None:
    peaks = [500 * MIB, 200 * MIB, 90 * MIB, 40 * MIB, 8 * MIB]

    class Sized(NoGraphs):
        def prepare(self, launch: object) -> int:
            return peaks[launch()]  # type: ignore[operator]

    def kept(limit: int | None) -> list[int]:
        bound, recorder = CaptureBound(CaptureLimits(limit), len(peaks)), Sized()
        found = [bound.capture(recorder, lambda i=i: i) for i in range(len(peaks))]  # type: ignore[misc]
        assert bound.num_graphs == sum(one is not None for one in found)
        return [i for i, one in enumerate(found) if one is not None]

    assert kept(None) == [0, 1, 2, 3, 4]
    assert kept(1000 * MIB) == [0, 1, 2, 3, 4]
    assert kept(220 * MIB) == [1, 2, 3, 4]
    assert kept(100 * MIB) == [3, 4] or kept(100 * MIB) == [2, 3, 4]
    assert kept(0) == []


class _Timed(NoGraphs):
    """Captures that take so many seconds each of the clock ``now``."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)
        self.now = 0.0

    def prepare(self, launch: object) -> int:
        self.now += next(self._seconds)
        return 0


@pytest.mark.parametrize(
    ("limit", "seconds", "expected"),
    [
        pytest.param(None, [9.0] * 6, [0, 1, 2, 3, 4, 5], id="no limit"),
        pytest.param(10.0, [0.02] * 6, [0, 1, 2, 3, 4, 5], id="time enough"),
        pytest.param(0.21, [0.04] * 6, [2, 3, 4, 5], id="the largest are left out"),
        pytest.param(0.31, [0.2, 0.01, 0.01, 0.01], [0, 4, 5], id="a slow first one says nothing of the others"),
        pytest.param(0.001, [0.1] * 6, [], id="no time"),
    ],
)
def test_the_largest_graphs_are_left_out_where_time_is_bounded(
    limit: float | None, seconds: list[float], expected: list[int]
) -> None:
    recorder = _Timed(seconds)
    bound = CaptureBound(CaptureLimits(seconds=limit), 6, clock=lambda: recorder.now)
    found = [bound.capture(recorder, lambda: None) is not None for _ in range(6)]
    assert [i for i, one in enumerate(found) if one] == expected


def test_ranks_have_time_while_all_have() -> None:
    answers = iter([1, 0])
    bound = CaptureBound(CaptureLimits(seconds=60.0), 2, lambda own: min(own, next(answers)), clock=lambda: 0.0)
    assert [bound.capture(NoGraphs(), lambda: None) is not None for _ in range(2)] == [True, False]
