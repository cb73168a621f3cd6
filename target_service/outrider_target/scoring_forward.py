"""One forward of the target: rows of the running batch, and jobs of single items beside them, with their scoring.

Owns the launch of the forward and of the scoring after it, and when both have ended. Which rows and logits are whose,
and what becomes of them, is ``step_rows``' and ``job_rows``'.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outrider.kernels.device_stream import Mark, to_device
from outrider.model_executor.model_runner import ModelRunner, PlannedBatch
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Scores
from outrider.serving.executor import ExecutorOutput
from outrider_target.job_rows import JobRows, next_job
from outrider_target.jobs import ScoreJob
from outrider_target.step_rows import StepRows

if TYPE_CHECKING:
    from outrider.serving.decode.lookahead_step import LookaheadStep
    from outrider.serving.decode.step import DecodeBatch
    from outrider_target.planes import TargetPlanes


class ScoringForward:
    """A forward, and the scoring of those whose last tokens are among its, both started."""

    def __init__(
        self,
        runner: ModelRunner,
        shares: Sequence[tuple[ScoreJob, int]] = (),
        step: LookaheadStep | DecodeBatch | None = None,
        *,
        drawn: torch.Tensor | None = None,
        follows: tuple[ScoringForward, Sequence[int]] | None = None,
        planes: TargetPlanes | None = None,
    ) -> None:
        """``shares``: this many tokens of jobs; ``step``: a step of the running batch, whose rows come first.

        ``drawn`` [B] int32 holds the one token of each row where the device alone knows it; ``follows`` is the forward
        that draws those of jobs, with their indices among its jobs. ``planes`` take hidden states.
        """
        self._runner, self._follows = runner, follows
        self.jobs = [job for job, _ in shares]
        self._step = None if step is None else StepRows(step, planes, is_drawn=drawn is not None)
        self._jobs = JobRows(shares, planes) if shares else None
        self._parts = [part for part in (self._step, self._jobs) if part is not None]
        self._is_launched = False
        """Scoring was started, that of masked rows too."""
        if drawn is None:
            self.begin_masks()
        self._launch(drawn, None if step is None else step.plan)
        # Without it the forward's time would be counted where its result is first read.
        self._forward = Mark(runner.device)
        self._begin_scoring()

    def _launch(self, drawn: torch.Tensor | None, plan: PlannedBatch | None) -> None:
        """Start the forward. Hidden states are handed over before it is marked: when that is reached, they are where
        the draft finds them.
        """
        parts = self._parts
        if drawn is not None and self._step is None:
            batch = RowBatch.drawn([job.sequence for job in self.jobs])
        else:
            batch = parts[0].batch() if len(parts) == 1 else RowBatch.joined(*[part.batch() for part in parts])
        layers = parts[0].layers if len(parts) == 1 else sorted({layer for part in parts for layer in part.layers})
        self._logits, states = self._runner.forward_batch(batch, layers, drawn=drawn, plan=plan)
        self._used_graph = self._runner.used_graph
        for part, own in zip(
            parts, self._split(states, 0 if self._jobs is None else self._jobs.num_tokens), strict=True
        ):
            part.hand_over(own, layers)

    def begin_masks(self, *, is_awaited: bool = False) -> None:
        """Start to make the masks of grammars, while the forward runs; the tokens of the rows are known."""
        for part in self._parts:
            part.begin_masks(self._runner.sampler, is_awaited=is_awaited)

    def _begin_scoring(self) -> None:
        """Start the scoring, before the forward has ended: preparing it costs the device no time."""
        parts = self._parts
        for part, own in zip(
            parts, self._split(self._logits, 0 if self._jobs is None else self._jobs.num_logits), strict=True
        ):
            part.begin_scoring(self._runner.sampler, own)

    def _split(self, rows: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Rows of the step, and those of the jobs: the last ``count``."""
        return [rows] if len(self._parts) == 1 else [rows[: len(rows) - count], rows[len(rows) - count :]]

    @torch.inference_mode()
    def is_done(self) -> bool:
        """True if the forward has ended; asked of the oldest one, whose tokens are known. Starts the scoring that
        waited for masks, once these are made. Masks of what was queued are made here, while the forward runs: another
        thread would only contend for the interpreter with this one.
        """
        self.begin_masks(is_awaited=True)
        if not self._is_launched and all(part.has_masks for part in self._parts):
            self._is_launched = True
            for part in self._parts:
                part.launch_scoring()
        return self._forward.is_reached()

    @property
    def reads_nothing(self) -> bool:
        """True if nothing is read of logits and states when it has ended."""
        return self._step is None and (self._jobs is None or self._jobs.reads_nothing)

    @torch.inference_mode()
    def drawn(self) -> torch.Tensor | None:
        """Token drawn after each text of a step, [B] on the device; None if the device does not know, or jobs beside it
        have results that are read once the forward has ended. The tokens of the step are known; waits for masks of
        grammars.
        """
        if self._step is None:
            return None
        self.begin_masks(is_awaited=True)
        if self._jobs is not None and not self._jobs.launch_scoring():
            return None
        return self._step.drawn()

    @torch.inference_mode()
    def queue_next(self) -> ScoringForward | None:
        """The forward over the tokens that the scoring of jobs draws, for all sessions that go on after it; None: the
        device cannot tell what they are, or no session goes on. No sequence may have been cut since this was started.
        """
        jobs = self._jobs
        if self._step is not None or jobs is None or not jobs.are_decode_steps:
            return None
        indices = [i for i, job in enumerate(self.jobs) if not job.is_last_step]
        self.begin_masks(is_awaited=True)
        if not indices or (drawn := jobs.drawn()) is None:
            return None
        if len(indices) < len(self.jobs):
            drawn = drawn[to_device(indices, drawn.device)]
        shares = [(next_job(self.jobs[i]), 1) for i in indices]
        return ScoringForward(self._runner, shares, drawn=drawn, follows=(self, indices))

    @property
    def indices(self) -> Sequence[int]:
        """Index of each job among those of the forward that it follows."""
        return () if self._follows is None else self._follows[1]

    def fed_token(self, index: int) -> int:
        """Token that row ``index`` was computed over; the forward before has to be finished."""
        before, indices = self._follows or (None, ())
        if before is None or before._jobs is None:
            raise ValueError("this forward was told its tokens")
        return before._jobs.drawn_token(indices[index])

    @torch.inference_mode()
    def finish(self) -> ExecutorOutput[Scores]:
        """Wait for it; called once."""
        self._forward.wait()
        computed = time.perf_counter_ns()
        self.begin_masks(is_awaited=True)
        if self._jobs is None:
            output: ExecutorOutput[Scores] = ExecutorOutput((), computed, self._used_graph)
        else:
            output = self._jobs.finish(computed, used_graph=self._used_graph)
        return output if self._step is None else self._step.finish(output)
