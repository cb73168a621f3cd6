"""Drafts of a head for a step that came as columns: all states in one tensor, from where they were fetched to the loop.

Owns how the columns become rows of a loop, and what it drew becomes columns. Without loops, on a CPU and for blocks,
the step is computed as its single items would be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.columns import StateColumns
from outrider.kernels.device_stream import to_device
from outrider.kv_cache import KVSequence
from outrider.model_executor.draft_heads.runner import PAIR_LAG
from outrider.model_executor.draft_heads.state_rows import StateRows
from outrider.model_executor.draft_loop.columns import DraftColumns, MetadataColumns
from outrider.model_executor.draft_loop.in_flight import ColumnsInFlight
from outrider.model_executor.draft_loop.results import DrawnColumns, Draws
from outrider.ports import Proposal
from outrider.serving.executor import ExecutorOutput
from outrider.serving.session import Session
from outrider_draft.columns_forward import drawn_output, output_of
from outrider_draft.proposers.state_sequences import StateSequence

if TYPE_CHECKING:
    from outrider.serving.steady.step import SteadyStep
    from outrider_draft.proposers.head_executor import HeadExecutor


@dataclass(frozen=True, slots=True)
class SteadyHeads:
    """What a loop is told of sessions in every step."""

    kvs: list[KVSequence]  # [B] of their pairs
    metadata: MetadataColumns

    @classmethod
    def of(cls, sessions: Sequence[Session[StateSequence]]) -> SteadyHeads:
        """Of sessions whose tokens are drawn in loops."""
        states: list[Any] = [session.executor_state for session in sessions]  # ``HeadState``
        kvs: list[Any] = [session.sequence.kv for session in sessions]
        return cls(kvs, MetadataColumns.of([state.metadata for state in states]))

    def selected(self, places: NDArray[np.intp]) -> SteadyHeads:
        """Those at these places."""
        return SteadyHeads([self.kvs[place] for place in places.tolist()], self.metadata.selected(places))


class HeadColumnsForward:
    """A loop that runs, or a step that is computed when it is finished."""

    def __init__(self, executor: HeadExecutor, step: SteadyStep, states: StateColumns) -> None:
        """``states`` were fetched, and are those of the pairs."""
        self._executor, self._step = executor, step
        self._drawing: ColumnsInFlight | None = None
        if executor.runner.max_catch_up:
            self._begin(step.rows, states)

    def is_done(self) -> bool:
        """Always true: ``finish`` waits."""
        return True

    def finish(self) -> ExecutorOutput[Proposal]:
        """Wait for the tokens; called once."""
        if self._drawing is None:
            return self._as_items()
        drawn = self._drawing.finish()
        computed = time.perf_counter_ns()
        if isinstance(drawn, DrawnColumns):
            return drawn_output(self._step, drawn, computed)
        return output_of(self._step, drawn, computed)

    @torch.inference_mode()
    def _begin(self, rows: SteadyHeads, states: StateColumns) -> None:
        """Start the loop; then bring texts and last states up to date, which do not depend on what is drawn."""
        step, columns = self._step, self._step.columns
        own_rows, last_places = _rows_of(states, self._executor.runner.head.dtype)
        drawing = DraftColumns(
            rows.kvs,
            rows.metadata,
            step.bases.tolist(),
            columns.token_ids.tolist(),
            columns.counts.tolist(),
            self._executor.lengths(step).tolist(),
            [PAIR_LAG] * len(rows.kvs),
        )
        self._drawing = self._executor.runner.begin_draft(drawing, own_rows)
        last_states = own_rows.parts[0].index_select(0, last_places).split(1)  # type: ignore[no-untyped-call]
        for session, token_ids, last_state in zip(step.sessions, drawing.texts, last_states, strict=True):
            state: Any = session.executor_state
            state.last_state = last_state
            session.sequence.text.extend(token_ids)

    @torch.inference_mode()
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
