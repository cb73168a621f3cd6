"""One forward of the target over a plain step, which is held as arrays, and over single items beside it.

Owns how a step's sessions become rows of a forward. Their logits come first and are scored by
``outrider.sampling.scoring.plain``; single items are a ``ScoringForward``'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.kernels.device_stream import Mark
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.input_columns import RowColumns
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Scores
from outrider.serving.executor import ExecutorOutput
from outrider_target.jobs import ScoreJob
from outrider_target.scoring_forward import ScoringForward

if TYPE_CHECKING:
    from outrider.serving.steady.plain_step import PlainStep
    from outrider_target.planes import TargetPlanes


class PlainForward:
    """A forward and its scoring, both started."""

    def __init__(
        self,
        runner: ModelRunner,
        step: PlainStep,
        shares: Sequence[tuple[ScoreJob, int]] = (),
        *,
        drawn: torch.Tensor | None = None,
        planes: TargetPlanes | None = None,
    ) -> None:
        """``shares``: so many tokens of jobs beside the step. ``drawn`` [B]: its tokens, if the device alone knows
        them, and nothing is beside it then.
        """
        sequences = [session.sequence for session in step.sessions]
        self._beside: ScoringForward | None = None
        if shares:
            heads = zip(sequences, step.token_ids, strict=True)
            rows = [ForwardRow(sequence, (token_id,)) for sequence, token_id in heads]
            self._beside = ScoringForward(runner, shares, planes=planes, leading=rows)
            logits = self._beside.leading_logits
        else:
            columns = RowColumns.plain(sequences, step.bases - 1, None if drawn is not None else step.tokens)
            logits, _ = runner.forward_columns(columns, drawn=drawn)
        self._used_graph = runner.used_graph
        self._forward = Mark(runner.device)
        samplings: list[Any] = [session.executor_state for session in step.sessions]  # ``SessionSampling``
        texts = [sequence.token_ids for sequence in sequences]
        self._scoring = runner.sampler.begin_plain(logits, step.rows, samplings, texts, step.bases)

    def is_done(self) -> bool:
        """Whether the forward has ended."""
        return self._forward.is_reached()

    @torch.inference_mode()
    def drawn(self) -> torch.Tensor | None:
        """What follows each text, [B] on the device; None if the device does not know, or the step is not alone."""
        return None if self._beside is not None else self._scoring.drawn()

    @torch.inference_mode()
    def finish(self) -> ExecutorOutput[Scores]:
        """Wait for it; called once."""
        self._forward.wait()
        computed = time.perf_counter_ns()
        output: ExecutorOutput[Scores] = ExecutorOutput((), computed, self._used_graph)
        if self._beside is not None:
            output = replace(self._beside.finish(), computed_ns=computed)
        return replace(output, plain=self._scoring.tokens())
