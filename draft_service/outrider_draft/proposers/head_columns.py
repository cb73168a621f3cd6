"""Drafts of a head for a step that came as columns: all states in one tensor, from where they were fetched to the loop.

Owns how the columns become rows of a loop, and what it drew becomes columns. Without loops, on a CPU and for blocks,
the step is computed as its single items would be.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.columns import StateColumns
from outrider.kernels.device_stream import to_device
from outrider.model_executor.draft_heads.runner import PAIR_LAG
from outrider.model_executor.draft_heads.state_rows import StateRows
from outrider.model_executor.draft_loop import DraftRow
from outrider.model_executor.draft_loop.results import Draws
from outrider.ports import Proposal
from outrider.serving.executor import ExecutorOutput
from outrider_draft.columns_forward import output_of

if TYPE_CHECKING:
    from outrider.serving.steady.step import SteadyStep
    from outrider_draft.proposers.head_executor import HeadExecutor


class HeadColumnsForward:
    """A step that is computed when it is finished."""

    def __init__(self, executor: HeadExecutor, step: SteadyStep, states: StateColumns) -> None:
        """``states`` were fetched, and are those of the pairs."""
        self._executor, self._step = executor, step
        self._rows: list[DraftRow] = []
        if executor.runner.max_catch_up:
            self._lay_out()
            self._states, self._last_places = _rows_of(states, executor.runner.head.dtype)

    def is_done(self) -> bool:
        """Always true: ``finish`` waits."""
        return True

    @torch.inference_mode()
    def finish(self) -> ExecutorOutput[Proposal]:
        """Draw the tokens; called once."""
        if not self._rows:
            return self._as_items()
        drawn = self._executor.runner.draft(self._rows, self._states, self._settle)
        return output_of(self._step, drawn, time.perf_counter_ns())

    def _lay_out(self) -> None:
        columns, start = self._step.columns, 0
        ids = columns.token_ids.tolist()
        heads = zip(
            self._step.sessions, columns.counts.tolist(), self._executor.lengths(self._step).tolist(),
            self._step.bases.tolist(), strict=True,
        )  # fmt: skip
        for session, count, length, base in heads:
            state: Any = session.executor_state  # ``HeadState``
            row_ids = ids[start : start + count]
            self._rows.append(DraftRow(state.metadata, session.sequence.kv, row_ids, length, base, PAIR_LAG))
            start += count

    def _settle(self) -> None:
        """The texts and pairs of the sessions, as single items leave them: none of it depends on what is drawn, so it
        is done while the loop runs.
        """
        sequences = self._executor.sequences
        last_states = self._states.parts[0].index_select(0, self._last_places).split(1)  # type: ignore[no-untyped-call]
        heads = zip(self._step.sessions, self._rows, last_states, self._step.bases.tolist(), strict=True)
        for session, row, last_state, base in heads:
            state: Any = session.executor_state
            state.last_state = last_state
            session.sequence.text.extend(row.token_ids)
            sequences.keep_pairs(session.sequence, base - 1)

    def _as_items(self) -> ExecutorOutput[Proposal]:
        items: Any = self._step.columns.items()
        jobs = [self._executor.begin(session, item) for session, item in zip(self._step.sessions, items, strict=True)]
        output = self._executor.execute([(job, job.num_left) for job in jobs])
        answers = [answer for answer in output.results if isinstance(answer, Proposal)]
        if len(answers) < len(jobs):
            return output
        drawn = [Draws(answer.token_ids, answer.evidence) for answer in answers]
        found = output_of(self._step, drawn, output.computed_ns)
        return output if found.columns is None else found


def _rows_of(states: StateColumns, dtype: torch.dtype) -> tuple[StateRows, torch.Tensor]:
    """The states as a loop takes them, and the row [B] int32 of each session's last in their one part."""
    tensor, ends, places = states.tensor.to(dtype), states.counts.cumsum() - 1, states.places()
    if places is None:
        return StateRows([tensor]), to_device(ends.astype(np.int32), tensor.device)
    on_device = to_device(np.concatenate([places, places[ends]]).astype(np.int32), tensor.device)
    return StateRows([tensor], on_device[: len(places)]), on_device[len(places) :]
