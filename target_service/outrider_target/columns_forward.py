"""One forward of the target over a step that came as columns: greedy and coupled sessions, with drafts.

Owns how the columns become rows of a forward, and what its kernels found becomes columns. What follows for a session
that cannot be scored is decided as for single items.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.columns import AnswerColumns, ScoreColumns, StateColumns, token_scores
from outrider.errors import OutriderError
from outrider.kernels.device_stream import Mark
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Scores
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.serving.executor import ExecutorOutput
from outrider.types import HiddenStates, TokenScores
from outrider_target.layer_states import StepStates, in_order

if TYPE_CHECKING:
    from outrider.serving.steady.step import SteadyStep
    from outrider_target.planes import TargetPlanes


class ColumnsForward:
    """A forward and its scoring, both started."""

    def __init__(
        self, runner: ModelRunner, step: SteadyStep, columns: ScoreColumns, planes: TargetPlanes | None = None
    ) -> None:
        """``planes`` take hidden states; None: they go inline."""
        self._step, self._columns = step, columns
        drafts = _rows(columns.draft_token_ids.tolist(), columns.draft_lengths.tolist())
        committed = _rows(columns.token_ids.tolist(), columns.counts.tolist())
        rows = [
            ForwardRow(session.sequence, ids + draft, len(draft) + 1)
            for session, ids, draft in zip(step.sessions, committed, drafts, strict=True)
        ]
        self._states: StepStates | None = None
        if columns.hidden_states_from is None:
            logits = runner.forward(rows, as_computed=True)
        else:
            wanted = step.sessions[0].open.hidden_state_layers
            layers = sorted(set(wanted))
            logits, states = runner.forward_with_states(rows, layers)
            # Before the mark below: when that is reached, they are where the draft finds them.
            self._states = StepStates(planes, step, columns, in_order(states, wanted, layers))
        self._forward = Mark(runner.device)
        # While the device computes:
        samplings: list[Any] = [session.executor_state for session in step.sessions]  # ``SessionSampling``
        requests = [
            ScoreRequest(sampling, row.sequence.token_ids, base, draft)
            for sampling, row, base, draft in zip(samplings, rows, step.bases.tolist(), drafts, strict=True)
        ]
        self._scoring = runner.sampler.begin_scoring(logits, requests)

    def is_done(self) -> bool:
        """Whether the forward has ended."""
        return self._forward.is_reached()

    @torch.inference_mode()
    def finish(self) -> ExecutorOutput[Scores]:
        """Wait for it; called once."""
        self._forward.wait()
        computed = time.perf_counter_ns()
        tokens = self._scoring.tokens()
        states = None if self._states is None else self._states.columns()
        if tokens is not None and (self._states is None or states is not None):
            return ExecutorOutput((), computed, columns=self._answers(tokens, states))
        outcomes = self._scoring.outcomes()
        forms = [outcome.form for outcome in outcomes]
        rows = [form.token_ids for form in forms if isinstance(form, TokenScores)]
        if len(rows) < len(forms) or (self._states is not None and states is None):
            return ExecutorOutput(self._one_by_one(outcomes, states), computed)
        found = np.array([token_id for row in rows for token_id in row], dtype=np.uint32)
        return ExecutorOutput((), computed, columns=self._answers(found, states))

    def _answers(self, token_ids: np.ndarray, states: StateColumns | None) -> AnswerColumns[Scores]:  # [sum(K+1)]
        columns, step = self._columns, self._step
        counts = step.draft_lengths + 1
        return AnswerColumns(
            columns.sessions, columns.generations, step.bases, counts, token_ids, (), token_scores, None, states
        )

    def _one_by_one(
        self, outcomes: list[ScoreOutcome], states: StateColumns | None
    ) -> list[Scores | OutriderError | None]:
        columns = self._columns
        heads = zip(columns.sessions.tolist(), columns.generations.tolist(), self._step.bases.tolist(), strict=True)
        handed: Iterable[HiddenStates | None] = [None] * len(outcomes)
        if self._states is not None:
            handed = self._states.inline() if states is None else states.hidden_states()
        return [
            outcome.error if outcome.form is None else Scores(*head, outcome.form, hidden_states=own)
            for head, outcome, own in zip(heads, outcomes, handed, strict=True)
        ]


def _rows(values: list[int], counts: list[int]) -> list[list[int]]:
    found, start = [], 0
    for count in counts:
        found.append(values[start : start + count])
        start += count
    return found
