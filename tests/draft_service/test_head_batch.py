"""Work of a head while its draft loop runs: a loop without kernels stands in for the device's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels.draft_sampling.layout import NUM_FIELDS, Field
from outrider.model_executor.draft_heads.runner import DraftHeadRunner
from outrider.model_executor.draft_heads.state_rows import HeadStateRows
from outrider.model_executor.draft_loop import DraftMetadata, DraftRow
from outrider.model_executor.draft_loop.batched import DraftBatch, MetadataBatch
from outrider.model_executor.draft_loop.results import DrawnBatch
from outrider.ports import Open
from outrider.types import JudgingRule, SamplingParams
from outrider_draft.proposers.head_executor import HeadExecutor
from tests.draft_service.head_rig import served
from tests.support.eagle3 import build_eagle3
from tests.support.tiny_models import cached_tiny_model


class IdleLoop:
    """Draws token 7 always; says what is asked of it."""

    max_rows, max_prefill = 2, 4

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def command_for(self, plan: Any) -> Any:
        self._note(f"plan {len(plan.contexts)}")
        return _Command(plan.num_steps, len(plan.contexts))

    def run(self, shape: Any, numbers: object) -> None:
        self._note("run")

    def results(self, shape: Any, *, with_supports: bool) -> tuple[Any, None]:
        self._note("wait")
        records = np.zeros((shape.num_steps, shape.num_rows, NUM_FIELDS), dtype=np.int32)
        records[..., Field.TOKEN] = 7
        return records, None


class _Command:
    def __init__(self, num_steps: int, num_rows: int) -> None:
        self.arguments, self.numbers = (num_rows, num_steps, 2, 4), None


@pytest.fixture
def runner(tmp_path: Path) -> DraftHeadRunner:
    executor = served("eagle3", build_eagle3(tmp_path), cached_tiny_model("llama", seed=1)).executor
    assert isinstance(executor, HeadExecutor)
    return executor.runner


def opening(session: int) -> Open:
    return Open(
        session=session, generation=1, sampling=SamplingParams(temperature=0.0), seed=0,
        judging_rule=JudgingRule.GREEDY, prompt_length=3, max_length=30, num_token_ids=256,
    )  # fmt: skip


def test_rows_past_those_of_a_loop_are_drawn_by_the_next_one(
    runner: DraftHeadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner, "_loop", IdleLoop(said.append))
    monkeypatch.setattr(runner, "_put_states", lambda states, begin, end: said.append(f"states {begin} to {end}"))
    sequences = [runner.sequences.open(30) for _ in range(3)]
    rows = [
        DraftRow(DraftMetadata.of(opening(number), 272), sequence, [3, 4], 3, 3, 1)
        for number, sequence in enumerate(sequences)
    ]
    drawn = runner.draft(rows, HeadStateRows([torch.zeros(6, 96)]))
    assert [one.token_ids for one in drawn] == [(7, 7, 7)] * 3
    assert said == ["states 0 to 4", "plan 2", "run", "wait", "states 4 to 6", "plan 1", "run", "wait"]
    assert [sequence.length for sequence in sequences] == [2, 2, 2]
    runner.sequences.check_integrity()


def test_a_loop_of_columns_runs_while_its_sequences_are_brought_up_to_date(
    runner: DraftHeadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner, "_loop", IdleLoop(said.append))
    monkeypatch.setattr(runner, "_put_states", lambda states, begin, end: said.append(f"states {begin} to {end}"))
    sequences = [runner.sequences.open(30) for _ in range(2)]
    metadata = MetadataBatch.of([DraftMetadata.of(opening(number), 272) for number in range(2)])
    batched = DraftBatch(sequences, metadata, [3, 4], [3, 4, 5, 6, 7], [2, 3], [3, 2], [1, 1])
    flight = runner.begin_draft(batched, HeadStateRows([torch.zeros(5, 96)]))
    assert said == ["states 0 to 5", "plan 2", "run"]
    assert [sequence.token_ids for sequence in sequences] == [[3, 4], [5, 6, 7]]
    drawn = flight.finish()
    assert isinstance(drawn, DrawnBatch)
    assert (drawn.counts, drawn.token_ids.tolist()) == ([3, 2], [7] * 5)
    assert [sequence.token_ids for sequence in sequences] == [[3, 4], [5, 6, 7]]
    runner.sequences.check_integrity()


@pytest.mark.parametrize("sizes", [[9], [2, 3, 4], [1] * 9])
def test_states_come_to_the_loop_by_one_copy_wherever_they_lie(sizes: list[int]) -> None:
    states = torch.randn(9, 96)
    indices = torch.randperm(20)[:9].int()
    scattered = torch.full((20, 96), torch.nan)
    scattered[indices] = states
    parts = states.split(sizes)  # type: ignore[no-untyped-call]
    for rows in (HeadStateRows(parts), HeadStateRows([scattered], indices)):
        for first, last in ((0, 9), (0, 4), (3, 8), (8, 9), (5, 5)):
            out = torch.full((last - first, 96), torch.nan)
            rows.copy_to(out, first)
            assert torch.equal(out, states[first:last])
