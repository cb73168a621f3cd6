"""Cost profile: which points are measured, within which bounds, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.kernels.experts import Routing, route
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool
from outrider.kv_cache.state_slots import StateRows
from outrider.model_executor import cost_profile
from outrider.model_executor.cost_profile import (
    LONG_CONTEXT,
    SHORT_CONTEXT,
    Grid,
    measure,
    profile_draft,
    profile_target,
)
from outrider.model_executor.layers import experts
from tests.model_executor.parity import build, poisoned_runner

GRID = Grid(rows=(1, 4), lengths=(1, 3))


class Steps:
    """Steps that take no time of their own and count their runs."""

    def __init__(self, *, num_pages: int, max_model_len: int = 4096) -> None:
        self.sequences = KVCacheManager(PagePool(num_pages, 16))
        self.max_model_len = max_model_len
        self.contexts: list[tuple[int, int, int]] = []

    def step(self, sequences: Sequence[KVSequence], length: int) -> Callable[[], object]:
        def run() -> None:
            for sequence in sequences:
                self.sequences.extend(sequence, [0] * length)
            self.contexts.append((len(sequences), length, sequences[0].length - length))

        return run


def points(steps: Steps, bound_s: float = 10.0) -> list[tuple[int, int, int]]:
    found = measure(steps, GRID, bound_s)
    assert all(cost.duration_ns > 0 for cost in found)
    return [(cost.num_rows, cost.num_tokens, cost.context_length) for cost in found]


def test_each_point_is_run_with_its_context_and_leaves_no_page_taken() -> None:
    steps = Steps(num_pages=1000)
    expected = [
        (rows, length, context)
        for rows in GRID.rows
        for length, context in [(1, SHORT_CONTEXT), (3, SHORT_CONTEXT), (1, LONG_CONTEXT)]
    ]
    assert points(steps) == expected
    assert list(dict.fromkeys(steps.contexts)) == expected
    assert steps.sequences.pool.num_free == 1000
    steps.sequences.check_integrity()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_rows_have_tokens_of_their_own(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all would go to the same experts, and the tokens of several users meet more of them."""
    runner, met = poisoned_runner(build("qwen3_moe", num_experts=60), page_size=16), list[int]()
    with torch.inference_mode():
        runner.kv_cache.fill_(0)
    monkeypatch.setattr(experts, "route", lambda *args, **options: counted(met, *args, **options))
    if role == "target":
        profile_target(runner, max_rows=8, max_length=1, bound_s=10.0)
    else:
        profile_draft(runner, max_rows=8, max_length=1, bound_s=10.0)
    assert max(met) > 8


@pytest.mark.parametrize("role", ["target", "draft"])
def test_states_are_replayed_and_written_as_in_a_decode_step(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a hybrid's step reads and writes most would not be measured."""
    runner = poisoned_runner(build("qwen3_5_text"), page_size=16, num_state_slots=8)
    plan, moved = runner.sequences.plan_states, set[tuple[int, ...]]()

    def planned(sequences: Sequence[KVSequence], lengths: Sequence[int], *rest: Any) -> StateRows | None:
        rows = plan(sequences, lengths, *rest)
        assert rows is not None
        moved.update((length, *row) for length, row in zip(lengths, rows.numbers[1:].T.tolist(), strict=True))
        return rows

    monkeypatch.setattr(runner.sequences, "plan_states", planned)
    profile = profile_target if role == "target" else profile_draft
    assert len(profile(runner, max_rows=8, max_length=5, bound_s=10.0)) >= 4
    first = {row for row in moved if row[0] == SHORT_CONTEXT}
    assert first == {(SHORT_CONTEXT, SHORT_CONTEXT - 2, SHORT_CONTEXT - 1)}
    runner.sequences.check_integrity()


def counted(met: list[int], logits: torch.Tensor, num_chosen: int, **options: Any) -> Routing:
    """The routing; how many experts it meets is added to ``met``."""
    routing = route(logits, num_chosen, **options)
    met.append(len(set(routing.expert_ids.flatten().tolist())))
    return routing


def test_points_without_room_are_left_out() -> None:
    assert points(Steps(num_pages=39)) == [(1, 1, SHORT_CONTEXT), (1, 3, SHORT_CONTEXT)]
    short = points(Steps(num_pages=1000, max_model_len=1000))
    assert {context for _, _, context in short} == {SHORT_CONTEXT}


def test_a_bound_leaves_out_batch_sizes() -> None:
    assert points(Steps(num_pages=1000), bound_s=0.0) == []


def test_a_point_that_fails_ends_the_measurement_and_not_the_service(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Steps):
        def step(self, sequences: Sequence[KVSequence], length: int) -> Callable[[], object]:
            if len(sequences) > 1:
                raise RuntimeError("out of memory")
            return super().step(sequences, length)

    steps = Failing(num_pages=1000)
    assert {rows for rows, _, _ in points(steps)} == {1}
    assert steps.sequences.pool.num_free == 1000
    assert "ended early: RuntimeError: out of memory" in caplog.text


@pytest.mark.parametrize(("is_gpu", "rows"), [(True, {1, 4, 16, 64}), (False, {1, 8})])
def test_a_grid_keeps_to_the_limits(is_gpu: bool, rows: set[int]) -> None:
    grid = Grid.of(is_gpu=is_gpu, max_rows=100, max_length=5)
    assert set(grid.rows) == rows
    assert max(grid.lengths) <= 5 and min(grid.lengths) == 1


def test_a_model_is_as_before_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_profile, "SHORT_CONTEXT", 8)
    runner = poisoned_runner(build("llama"), page_size=4)
    target = profile_target(runner, max_rows=8, max_length=4, bound_s=10.0)
    draft = profile_draft(runner, max_rows=8, max_length=5, bound_s=10.0)
    for found in (target, draft):
        assert {(1, 1), (1, 5), (8, 1), (8, 5)} <= {(cost.num_rows, cost.num_tokens) for cost in found}
    assert profile_draft(runner, max_rows=8, max_length=0, bound_s=10.0) == ()
    assert (runner.num_forwards, runner.sequences.pool.num_free) == (0, 800)
    runner.sequences.check_integrity()


def test_hybrids_are_measured_with_as_many_rows_as_have_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_profile, "SHORT_CONTEXT", 8)
    runner = poisoned_runner(build("qwen3_5_text"), page_size=16, num_state_slots=4)
    found = profile_target(runner, max_rows=8, max_length=2, bound_s=10.0)
    assert {cost.num_rows for cost in found} == {1}
    states = runner.sequences.states
    assert states is not None and states.pool.num_free == 4
