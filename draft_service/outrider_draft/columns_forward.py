"""Drafts of a model for a step that came as columns: sessions that draw all their tokens in one loop.

Owns how the columns become rows of a loop, and what it drew becomes columns. What follows for a session that nothing
could be drawn for is decided as for single items.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.columns import AnswerColumns, SupportColumns
from outrider.errors import OutriderError
from outrider.model_executor.draft_loop import DraftMetadata, DraftRow
from outrider.model_executor.draft_loop.results import Draws
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Proposal
from outrider.serving.executor import ExecutorOutput
from outrider.types import SparseEvidence

if TYPE_CHECKING:
    from outrider.serving.steady.step import Ints, SteadyStep


class ColumnsForward:
    """A loop that runs when it is finished."""

    def __init__(self, runner: ModelRunner, step: SteadyStep, metadata: Sequence[DraftMetadata], lengths: Ints) -> None:
        """``lengths`` [B]: the tokens to be drawn, which are no more than one loop draws."""
        self._runner, self._step = runner, step
        ids, start = step.columns.token_ids.tolist(), 0
        self._rows: list[DraftRow] = []
        heads = zip(
            step.sessions, metadata, step.columns.counts.tolist(), lengths.tolist(), step.bases.tolist(), strict=True
        )
        for session, own, count, length, base in heads:
            self._rows.append(DraftRow(own, session.sequence, ids[start : start + count], length, base))
            start += count

    def is_done(self) -> bool:
        """Always true: ``finish`` waits."""
        return True

    def finish(self) -> ExecutorOutput[Proposal]:
        """Draw the tokens; called once."""
        drawn = self._runner.draft(self._rows)
        return output_of(self._step, drawn, time.perf_counter_ns())


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
