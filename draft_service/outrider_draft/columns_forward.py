"""Drafts of a model for a step that came as columns: sessions that draw all their tokens in one loop.

Owns how what a loop drew becomes columns. What follows for a session that nothing
could be drawn for is decided as for single items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.columns import AnswerColumns, SupportColumns
from outrider.errors import OutriderError
from outrider.model_executor.draft_loop.columns import DraftColumns
from outrider.model_executor.draft_loop.results import DrawnColumns, Draws
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Proposal
from outrider.serving.executor import ExecutorOutput
from outrider.types import SparseEvidence

if TYPE_CHECKING:
    from outrider.serving.steady.step import SteadyStep


class ColumnsForward:
    """A loop that runs."""

    def __init__(self, runner: ModelRunner, step: SteadyStep, columns: DraftColumns) -> None:
        self._step, self._drawing = step, runner.begin_draft(columns)

    def is_done(self) -> bool:
        """Always true: ``finish`` waits."""
        return True

    def finish(self) -> ExecutorOutput[Proposal]:
        """Wait for the tokens; called once."""
        drawn = self._drawing.finish()
        computed = time.perf_counter_ns()
        if isinstance(drawn, DrawnColumns):
            return drawn_output(self._step, drawn, computed, self._drawing.settle)
        self._drawing.settle()
        return output_of(self._step, drawn, computed)


def drawn_output(
    step: SteadyStep, drawn: DrawnColumns, computed_ns: int, settle: Callable[[], None] | None = None
) -> ExecutorOutput[Proposal]:
    """What was drawn for the sessions of a step; ``settle`` as ``ExecutorOutput`` has it."""
    columns, supports = step.columns, drawn.supports
    answers: AnswerColumns[Proposal] = AnswerColumns(
        columns.sessions,
        columns.generations,
        step.bases,
        np.array(drawn.counts, dtype=np.uint32),
        drawn.token_ids.view(np.uint32),
        (),
        Proposal,
        supports=None if supports is None else SupportColumns(supports.counts, supports.token_ids, supports.probs),
    )
    return ExecutorOutput((), computed_ns, columns=answers, settle=settle)


def output_of(step: SteadyStep, drawn: Sequence[Draws], computed_ns: int) -> ExecutorOutput[Proposal]:
    """What was drawn for the sessions of a step, as columns where all have tokens, and evidence of one form."""
    columns = step.columns
    sparse = [draws.evidence for draws in drawn if isinstance(draws.evidence, SparseEvidence)]
    is_uniform = len(sparse) == len(drawn) or all(draws.evidence is None for draws in drawn)
    if not is_uniform or not all(draws.token_ids for draws in drawn):
        return ExecutorOutput(_one_by_one(step, drawn), computed_ns)
    counts = np.array([len(draws.token_ids) for draws in drawn], dtype=np.uint32)
    token_ids = np.array([token_id for draws in drawn for token_id in draws.token_ids], dtype=np.uint32)
    supports = _joined(sparse) if sparse else None
    answers: AnswerColumns[Proposal] = AnswerColumns(
        columns.sessions, columns.generations, step.bases, counts, token_ids, (), Proposal, supports=supports
    )
    return ExecutorOutput((), computed_ns, columns=answers)


def _one_by_one(step: SteadyStep, drawn: Sequence[Draws]) -> list[Proposal | OutriderError | None]:
    columns = step.columns
    heads = zip(columns.sessions.tolist(), columns.generations.tolist(), step.bases.tolist(), strict=True)
    return [
        Proposal(*head, draws.token_ids, draws.evidence) if draws.token_ids else draws.error
        for head, draws in zip(heads, drawn, strict=True)
    ]


def _joined(evidence: Sequence[SparseEvidence]) -> SupportColumns:
    return SupportColumns(
        np.concatenate([one.counts for one in evidence]),
        np.concatenate([one.token_ids for one in evidence]),
        np.concatenate([one.probs for one in evidence]),
    )
