"""Drafts of a head for a step that came as arrays: all states in one tensor, from where they were fetched to the loop.

Owns how the arrays become rows of a loop, and what it drew becomes arrays. Without loops, on a CPU and for blocks,
the step is computed as its single items would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.batched import StateBatch
from outrider.kernels.device_stream import to_device
from outrider.model_executor.draft_heads.state_rows import HeadStateRows
from outrider.model_executor.draft_loop.batched import DraftBatch
from outrider.model_executor.draft_loop.results import Draws
from outrider.ports import Proposal
from outrider.serving.executor import ExecutorOutput
from outrider_draft.batch_forward import LoopForward, output_of

if TYPE_CHECKING:
    from outrider.serving.decode.step import DecodeBatch
    from outrider_draft.proposers.head_executor import HeadExecutor


@torch.inference_mode()
def begin_loop(executor: HeadExecutor, step: DecodeBatch, states: StateBatch) -> LoopForward:
    """Start the loop; then bring texts and last states up to date, which do not depend on what is drawn. ``states``
    were fetched, and are those of the pairs.
    """
    rows, batched = step.rows, step.batched
    own_rows, last_indices = _rows_of(states, executor.runner.head.dtype)
    drawing = DraftBatch(
        rows.kvs,
        rows.metadata,
        step.bases.tolist(),
        batched.token_ids.tolist(),
        batched.counts.tolist(),
        executor.lengths(step).tolist(),
        rows.kv_offsets,
    )
    forward = LoopForward(step, executor.runner.begin_draft(drawing, own_rows))
    last_states = own_rows.parts[0].index_select(0, last_indices).split(1)  # type: ignore[no-untyped-call]
    for session, token_ids, last_state in zip(step.sessions, drawing.texts, last_states, strict=True):
        state: Any = session.executor_state
        state.last_state = last_state
        session.sequence.text.extend(token_ids)
    return forward


class ItemsForward:
    """A step that is computed as its single items would be, when it is finished."""

    def __init__(self, executor: HeadExecutor, step: DecodeBatch) -> None:
        self._executor, self._step = executor, step

    def is_done(self) -> bool:
        """Always true: ``finish`` waits."""
        return True

    @torch.inference_mode()
    def finish(self) -> ExecutorOutput[Proposal]:
        """Compute it; called once."""
        items: Any = self._step.batched.items()
        jobs = [self._executor.begin(session, item) for session, item in zip(self._step.sessions, items, strict=True)]
        output = self._executor.execute([(job, job.num_left) for job in jobs])
        answers = [answer for answer in output.results if isinstance(answer, Proposal)]
        if len(answers) < len(jobs):
            return output
        drawn = [Draws(answer.token_ids, answer.evidence) for answer in answers]
        found = output_of(self._step, drawn, output.computed_ns)
        return output if found.batched is None else found


def _rows_of(states: StateBatch, dtype: torch.dtype) -> tuple[HeadStateRows, torch.Tensor]:
    """The states as a loop takes them, and the row [B] int32 of each session's last in their one part."""
    tensor, ends, indices = states.tensor.to(dtype), states.counts.cumsum() - 1, states.indices()
    if indices is None:
        return HeadStateRows([tensor]), to_device(ends.astype(np.int32), tensor.device)
    on_device = to_device(np.concatenate([indices, indices[ends]]).astype(np.int32), tensor.device)
    return HeadStateRows([tensor], on_device[: len(indices)]), on_device[len(indices) :]
