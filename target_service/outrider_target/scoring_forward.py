"""One forward of the target and the scoring of those whose last tokens are among its.

Owns which logits are whose, and what becomes of them. How tokens are drawn and probabilities taken is
``outrider.sampling``'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import OutriderError
from outrider.kernels.device_stream import Mark, to_device
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.input_columns import RowColumns
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import HiddenStateChunk, Score, Scores
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.sampling.logprobs import prompt_logprobs
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.sampler import Sampler
from outrider.sampling.scoring.fused import Scoring
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.serving.executor import ExecutorOutput
from outrider.types import HiddenStates, part_of
from outrider_target.jobs import ScoreJob
from outrider_target.layer_states import StateHandover, layers_wanted, rows_of

if TYPE_CHECKING:
    from outrider_target.planes import TargetPlanes


@dataclass(slots=True)
class _Rows:
    """Where one job's logits lie in those of a forward."""

    job: ScoreJob
    share: int
    start: int
    num_logits: int
    num_prompt_rows: int
    num_scored: int
    """The last of its logits: K+1 if its last tokens are among the share, else 0."""
    first: int
    """Place of the share's first token among the job's."""

    @property
    def score_start(self) -> int:
        return self.start + self.num_logits - self.num_scored


@dataclass(frozen=True, slots=True)
class Fed:
    """Tokens on the device that the forward before has drawn."""

    before: Scoring
    places: tuple[int, ...]
    """Of each, among the rows of that forward."""
    token_ids: torch.Tensor  # [R] int32


class ScoringForward:
    """One forward, and the scoring of those whose last tokens are among its, both started."""

    def __init__(
        self,
        runner: ModelRunner,
        shares: Sequence[tuple[ScoreJob, int]],
        fed: Fed | None = None,
        planes: TargetPlanes | None = None,
        leading: Sequence[ForwardRow] = (),
    ) -> None:
        """``fed`` holds the one token of each job where the device alone knows it; ``planes`` take hidden states.

        ``leading`` are rows with one position each that share the forward; they are scored elsewhere.
        """
        self.jobs = [job for job, _ in shares]
        self.places = fed.places if fed is not None else ()
        self._runner, self._fed = runner, fed
        self._rows = _lay_out(shares)
        self._handover: StateHandover | None = None
        own = [*leading, *map(_forward_row, self._rows)] if fed is None else ()
        if fed is None and (layers := layers_wanted(self.jobs)):
            starts = [row.job.sequence.length for row in self._rows]
            logits, states = runner.forward_with_states(own, layers)
            states = states[sum(len(row.token_ids) for row in leading) :] if leading else states
            self._handover = StateHandover(planes)
            # Before the mark below: when that is reached, they are where the draft finds them.
            self._handover.begin(_wanted(self._rows, starts, states, layers))
        elif fed is None:
            logits = runner.forward(own, as_computed=True)
        else:
            columns = RowColumns.drawn([job.sequence for job in self.jobs])
            logits, _ = runner.forward_columns(columns, drawn=fed.token_ids)
        self._logits = logits[len(leading) :] if leading else logits
        self.leading_logits = logits[: len(leading)]
        """Of ``leading``, row by row."""
        self._used_graph = runner.used_graph
        for row in self._rows:
            row.job.num_fed += row.share
        # Without it the forward's time would be counted where its result is first read.
        self._forward = Mark(runner.device)
        self._finished = [row for row in self._rows if row.num_scored]
        # Started before the forward has ended: preparing it costs the device no time.
        self._scoring = _begin(runner.sampler, self._logits, self._finished) if self._finished else None

    def is_done(self) -> bool:
        """Whether the forward has ended."""
        return self._forward.is_reached()

    @property
    def reads_nothing(self) -> bool:
        """Whether nothing is read of logits and states when it has ended."""
        return self._scoring is None and self._handover is None and not any(row.num_prompt_rows for row in self._rows)

    @torch.inference_mode()
    def queue_next(self) -> ScoringForward | None:
        """The forward over the tokens that this one's scoring draws, for all sessions that go on after it; None: the
        device cannot tell what they are, or no session goes on. No sequence may have been cut since this was started.
        """
        if self._scoring is None or not self._runner.takes_drawn or not all(map(_is_plain, self._rows)):
            return None
        places = tuple(i for i, job in enumerate(self.jobs) if not job.is_last_step)
        if not places or (drawn := self._scoring.drawn()) is None:
            return None
        if len(places) < len(self.jobs):
            drawn = drawn[to_device(places, drawn.device)]
        shares = [(_next_job(self.jobs[i]), 1) for i in places]
        return ScoringForward(self._runner, shares, Fed(self._scoring, places, drawn))

    def fed_token(self, index: int) -> int:
        """What row ``index`` was computed over; the forward before has to be finished."""
        if self._fed is None:
            raise ValueError("this forward was told its tokens")
        return self._fed.before.drawn_token(self._fed.places[index])

    @torch.inference_mode()
    def finish(self) -> ExecutorOutput[Scores]:
        """Wait for it; called once."""
        self._forward.wait()
        computed = time.perf_counter_ns()
        for row in self._rows:
            if row.num_prompt_rows:
                _take_prompt_logprobs(row, self._logits)
        outcomes = self._scoring.outcomes() if self._scoring else []
        finished = zip(self._finished, outcomes, strict=True)
        states = {} if self._handover is None else self._handover.finish()
        answers = {id(row.job): _answer(row.job, outcome, states.pop(id(row.job), None)) for row, outcome in finished}
        pushed = [(job.link_id, _chunk(job, states[id(job)])) for job in self.jobs if id(job) in states]
        results = [answers.get(id(job)) for job in self.jobs]
        return ExecutorOutput(results=results, computed_ns=computed, used_graph=self._used_graph, pushed=pushed)


def _wanted(
    rows: Sequence[_Rows], starts: Sequence[int], states: torch.Tensor, layers: Sequence[int]
) -> list[tuple[ScoreJob, int, torch.Tensor]]:
    """Of the states [T, F] of a forward those that are asked for: job, first position, rows [N, F]."""
    found = []
    first = 0
    for row, start in zip(rows, starts, strict=True):
        wanted = rows_of(row.job, start, states[first : first + row.share], layers)
        if wanted is not None:
            found.append((row.job, *wanted))
        first += row.share
    return found


def _is_plain(row: _Rows) -> bool:
    return row.share == row.num_scored == 1 and not row.num_prompt_rows and not row.job.wants_states


def _chunk(job: ScoreJob, states: HiddenStates) -> HiddenStateChunk:
    return HiddenStateChunk(job.score.session, job.score.generation, states)


def _next_job(job: ScoreJob) -> ScoreJob:
    """One token after this; which, is not known yet."""
    unknown = (0,)
    score = Score(job.score.session, job.score.generation, job.base, EMPTY_PREFIX, unknown)
    return ScoreJob(job.sampling, score, job.sequence, unknown, job.base + 1)


def _begin(sampler: Sampler, logits: torch.Tensor, finished: Sequence[_Rows]) -> Scoring:
    return sampler.begin_scoring(_score_logits(logits, finished), [_request(row.job) for row in finished])


def _lay_out(shares: Sequence[tuple[ScoreJob, int]]) -> list[_Rows]:
    """Rows that are only scored come first, so that their logits stand together and need not be copied."""
    reads_prompts = any(job.open.num_prompt_logprobs is not None for job, _ in shares)
    if reads_prompts:
        shares = sorted(shares, key=lambda entry: entry[0].num_prompt_rows > 0)
    rows: list[_Rows] = []
    start = 0
    for job, share in shares:
        num_prompt_rows = min(share, job.num_prompt_rows) if reads_prompts else 0
        num_scored = job.num_last if share == job.num_left else 0
        num_logits = share if num_prompt_rows else num_scored
        rows.append(_Rows(job, share, start, num_logits, num_prompt_rows, num_scored, job.num_fed))
        start += num_logits
    return rows


def _forward_row(row: _Rows) -> ForwardRow:
    job = row.job
    return ForwardRow(job.sequence, part_of(job.token_ids, row.first, row.first + row.share), row.num_logits)


def _take_prompt_logprobs(row: _Rows, logits: torch.Tensor) -> None:  # logits [N, V]
    count, job = row.num_prompt_rows, row.job
    known = job.token_ids[row.first + 1 : row.first + 1 + count]
    job.prompt_logprobs += prompt_logprobs(logits[row.start : row.start + count].float(), known, job.open)


def _score_logits(logits: torch.Tensor, rows: Sequence[_Rows]) -> torch.Tensor:  # [N, V] -> [sum(K+1), V]
    start, stop = rows[0].score_start, rows[-1].score_start + rows[-1].num_scored
    if stop - start == sum(row.num_scored for row in rows):  # nothing between them
        return logits[start:stop]
    return torch.cat([logits[row.score_start : row.score_start + row.num_scored] for row in rows])


def _request(job: ScoreJob) -> ScoreRequest:
    score = job.score
    return ScoreRequest(job.sampling, job.sequence.token_ids, job.base, score.draft_token_ids, score.support)


def _answer(job: ScoreJob, outcome: ScoreOutcome, states: HiddenStates | None) -> Scores | OutriderError:
    if outcome.error is not None:
        return outcome.error
    if outcome.form is None:
        raise TypeError("a score without an error has a form")
    return Scores(
        session=job.score.session,
        generation=job.score.generation,
        base_length=job.base,
        form=outcome.form,
        logprobs=outcome.logprobs,
        prompt_logprobs=tuple(job.prompt_logprobs),
        hidden_states=states,
        draft_token_ids=job.score.draft_token_ids if job.score.is_direct else (),
    )
