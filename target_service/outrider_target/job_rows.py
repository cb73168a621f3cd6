"""Jobs of single items as rows of a forward: prompts' chunks, and steps whose answers are more than tokens.

Owns which logits and hidden states are whose, and what becomes of them. How tokens are drawn and probabilities taken is
``outrider.sampling``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import OutriderError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import HiddenStateChunk, Score, Scores
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.sampling.logprobs import prompt_logprobs
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.sampler import Sampler
from outrider.sampling.scoring.fused import Scoring
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.serving.executor import ExecutorOutput
from outrider.structured_output import PositionMasks, made_within
from outrider.types import HiddenStates, part_of
from outrider_target.jobs import ScoreJob
from outrider_target.layer_states import StateHandover, layers_wanted, rows_of

if TYPE_CHECKING:
    from outrider_target.planes import TargetPlanes


@dataclass(slots=True)
class _Row:
    """Position of one job's logits among those of all jobs."""

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


class JobRows:
    """Rows of a forward: a share of each job's tokens."""

    def __init__(self, shares: Sequence[tuple[ScoreJob, int]], planes: TargetPlanes | None) -> None:
        """``planes`` take hidden states; None: they go inline."""
        self._jobs, self._rows = [job for job, _ in shares], _lay_out(shares)
        self._starts = [row.job.sequence.length for row in self._rows]
        self._finished = [row for row in self._rows if row.num_scored]
        self._scoring: Scoring | None = None
        self._masks: dict[int, PositionMasks] | None = None
        """Masks of jobs with a grammar whose last tokens are among the rows, by their ids; None until they are begun.
        """
        self._requests: list[ScoreRequest] = []
        self.layers = layers_wanted(self._jobs)
        """Layers whose hidden states are wanted."""
        self._handover = StateHandover(planes) if self.layers else None
        self.num_tokens = sum(share for _, share in shares)
        self.num_logits = sum(row.num_logits for row in self._rows)

    def batch(self) -> RowBatch:
        """The rows."""
        return RowBatch.of([_forward_row(row) for row in self._rows])

    def begin_masks(self, sampler: Sampler, *, is_awaited: bool = False) -> None:
        """Start to make the masks of the grammars; once. The tokens of the rows are known. ``is_awaited``: they are
        needed next.
        """
        if self._masks is not None:
            return
        self._masks = {id(row.job): _masks_of(row) for row in self._finished if row.job.sampling.has_grammar}
        if self._masks:
            sampler.begin_masks(list(self._masks.values()), is_awaited=is_awaited)
            self._give_masks()

    def _give_masks(self) -> None:
        for row, request in zip(self._finished, self._requests, strict=False):
            request.masks = (self._masks or {}).get(id(row.job))

    def hand_over(self, states: torch.Tensor, layers: Sequence[int]) -> None:  # [T, F]
        """Hand the hidden states of ``layers`` that are asked for to the drafts; the rows are launched."""
        for row in self._rows:
            row.job.num_fed += row.share
        if self._handover is not None:
            self._handover.begin(_wanted(self._rows, self._starts, states, layers))

    def begin_scoring(self, sampler: Sampler, logits: torch.Tensor) -> None:  # [N, V]
        """Start to score the jobs whose last tokens are among the rows."""
        self._logits = logits
        if self._finished:
            own = _score_logits(logits, self._finished)
            self._requests = [_request(row.job) for row in self._finished]
            if self._masks:
                self._give_masks()
            self._scoring = sampler.begin_scoring(own, self._requests)

    @property
    def reads_nothing(self) -> bool:
        """True if nothing is read of logits and states."""
        return self._scoring is None and self._handover is None and not any(row.num_prompt_rows for row in self._rows)

    @property
    def are_decode_steps(self) -> bool:
        """True if each is one token, and only the token after it is asked for."""
        return all(map(_is_decode_step, self._rows))

    @property
    def has_masks(self) -> bool:
        """True if the masks of the grammars are made."""
        return self._masks is not None and all(masks.is_ready for masks in self._masks.values())

    def launch_scoring(self) -> bool:
        """Launch all of the scoring, after a wait for masks; False if something is read of logits or states once the
        forward has ended.
        """
        if self._handover is not None or any(row.num_prompt_rows for row in self._rows):
            return False
        return self._scoring is None or self._scoring.launch_all()

    def drawn(self) -> torch.Tensor | None:
        """Token drawn after each text, [B] on the device; None if the device does not have it."""
        return None if self._scoring is None else self._scoring.drawn()

    def drawn_token(self, place: int) -> int:
        """One of ``drawn``, once the scoring has ended."""
        if self._scoring is None:
            raise ValueError("nothing was drawn on the device")
        return self._scoring.drawn_token(place)

    def finish(self, computed_ns: int, *, used_graph: bool) -> ExecutorOutput[Scores]:
        """The results, once the forward has ended."""
        for row in self._rows:
            if row.num_prompt_rows:
                _take_prompt_logprobs(row, self._logits)
        outcomes = self._scoring.outcomes() if self._scoring else []
        finished = zip(self._finished, outcomes, strict=True)
        states = {} if self._handover is None else self._handover.finish()
        masks = self._masks or {}
        answers = {id(row.job): _answer(row.job, outcome, states.pop(id(row.job), None)) for row, outcome in finished}
        answers |= {job_id: made.error for job_id, made in masks.items() if made.error is not None}
        pushed = [(job.link_id, _chunk(job, states[id(job)])) for job in self._jobs if id(job) in states]
        results = [answers.get(id(job)) for job in self._jobs]
        return ExecutorOutput(
            results=results,
            computed_ns=computed_ns,
            used_graph=used_graph,
            pushed=pushed,
            masked_ns=made_within(list(masks.values())),
        )


def next_job(job: ScoreJob) -> ScoreJob:
    """One token after a job; which, is not known yet."""
    unknown = (0,)
    score = Score(job.score.session, job.score.generation, job.base, EMPTY_PREFIX, unknown)
    return ScoreJob(job.sampling, score, job.sequence, unknown, job.base + 1)


def _is_decode_step(row: _Row) -> bool:
    return row.share == row.num_scored == 1 and not row.num_prompt_rows and not row.job.wants_states


def _wanted(
    rows: Sequence[_Row], starts: Sequence[int], states: torch.Tensor, layers: Sequence[int]
) -> list[tuple[ScoreJob, int, torch.Tensor]]:
    """Hidden states that are asked for, out of a forward's [T, F]: job, first position, rows [N, F]."""
    found = []
    first = 0
    for row, start in zip(rows, starts, strict=True):
        wanted = rows_of(row.job, start, states[first : first + row.share], layers)
        if wanted is not None:
            found.append((row.job, *wanted))
        first += row.share
    return found


def _chunk(job: ScoreJob, states: HiddenStates) -> HiddenStateChunk:
    return HiddenStateChunk(job.score.session, job.score.generation, states)


def _lay_out(shares: Sequence[tuple[ScoreJob, int]]) -> list[_Row]:
    """Rows that are only scored come first, so that their logits stand together and need not be copied."""
    reads_prompts = any(job.open.num_prompt_logprobs is not None for job, _ in shares)
    if reads_prompts:
        shares = sorted(shares, key=lambda entry: entry[0].num_prompt_rows > 0)
    rows: list[_Row] = []
    start = 0
    for job, share in shares:
        num_prompt_rows = min(share, job.num_prompt_rows) if reads_prompts else 0
        num_scored = job.num_last if share == job.num_left else 0
        num_logits = share if num_prompt_rows else num_scored
        rows.append(_Row(job, share, start, num_logits, num_prompt_rows, num_scored, job.num_fed))
        start += num_logits
    return rows


def _forward_row(row: _Row) -> ForwardRow:
    job = row.job
    return ForwardRow(job.sequence, part_of(job.token_ids, row.first, row.first + row.share), row.num_logits)


def _take_prompt_logprobs(row: _Row, logits: torch.Tensor) -> None:  # logits [N, V]
    count, job = row.num_prompt_rows, row.job
    known = job.token_ids[row.first + 1 : row.first + 1 + count]
    job.prompt_logprobs += prompt_logprobs(logits[row.start : row.start + count].float(), known, job.open)


def _score_logits(logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:  # [N, V] -> [sum(K+1), V]
    start, stop = rows[0].score_start, rows[-1].score_start + rows[-1].num_scored
    if stop - start == sum(row.num_scored for row in rows):  # nothing between them
        return logits[start:stop]
    return torch.cat([logits[row.score_start : row.score_start + row.num_scored] for row in rows])


def _request(job: ScoreJob) -> ScoreRequest:
    score = job.score
    return ScoreRequest(job.sampling, job.sequence.token_ids, job.base, score.draft_token_ids, score.support)


def _masks_of(row: _Row) -> PositionMasks:
    """Masks of the positions of a job, before its last tokens are appended or after."""
    job = row.job
    text = job.sequence.token_ids
    if len(text) < job.base:
        text = [*text, *part_of(job.token_ids, row.first, len(job.token_ids))]
    start = min(job.open.prompt_length, job.base)
    drafts = job.score.draft_token_ids
    return job.sampling.masks(text[start : job.base], drafts, position=job.base)


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
