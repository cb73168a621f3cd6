"""Scoring: what becomes of a ``Score`` between its arrival and its answer.

Owns the checks of an item, its prefill in chunks, the gathering of prompt logprobs and the K+1 rows of logits that its
answer is made from. How tokens are drawn and probabilities taken is ``outrider.engine.sampling``'s; who goes first is
``outrider.engine.scheduling``'s.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.engine.batch import ForwardRow
from outrider.engine.ledger import Session, check_ids
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.fused import Scoring, begin_scoring
from outrider.engine.sampling.logprobs import prompt_logprobs
from outrider.engine.sampling.rows import ScoreRequest
from outrider.engine.sampling.scoring import ScoreOutcome
from outrider.engine.sequences import Sequence as KvSequence
from outrider.engine.stage import Pass
from outrider.engine.waiting import Mark
from outrider.errors import InvalidRequestError, OutriderError
from outrider.ports import Open, Score, Scores
from outrider.types import (
    AcceptanceMethod,
    CandidateLogprobs,
    ScoreForm,
    SparseScores,
    Support,
    TokenScores,
    TypicalScores,
)

TargetSession = Session[KvSequence]


@dataclass(slots=True)
class ScoreJob:
    """One ``Score`` under way."""

    open: Open
    score: Score
    sequence: KvSequence
    token_ids: tuple[int, ...]
    """Committed and drafted tokens to be appended."""
    base: int
    """Committed tokens; the first draft token stands at this position."""
    num_fed: int = 0
    prompt_logprobs: list[CandidateLogprobs] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens still to be appended."""
        return len(self.token_ids) - self.num_fed

    @property
    def num_last(self) -> int:
        """The last committed token and the drafts after it, K+1."""
        return len(self.score.draft_token_ids) + 1

    @property
    def num_prompt_rows(self) -> int:
        """How many of the next tokens have a known prompt token after them whose logprob is wanted."""
        if self.open.num_prompt_logprobs is None:
            return 0
        return max(0, min(self.open.prompt_length, self.base) - 1 - self.sequence.length)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where one job's logits lie in those of a forward."""

    job: ScoreJob
    share: int
    start: int
    num_logits: int
    num_prompt_rows: int

    @property
    def is_last(self) -> bool:
        return self.share == self.job.num_left

    @property
    def score_start(self) -> int:
        return self.start + self.num_logits - self.job.num_last


class Scorer:
    """The target's ``outrider.engine.stage.AheadStage`` over one model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self._runner.sequences.pool.num_free

    def check(self, session: TargetSession, item: Score) -> Scores | None:
        """Raise ``InvalidRequestError`` for an item that cannot be served; none is answered without a forward."""
        check_score(session.open, item, vocab_size=self._runner.config.vocab_size)
        return None

    def begin(self, session: TargetSession, item: Score) -> ScoreJob:
        """The item's tokens, preceded by the last one kept if a prompt token's logprob has to be read after it."""
        token_ids = item.token_ids + item.draft_token_ids
        base = item.base_length + len(item.token_ids)
        if session.open.num_prompt_logprobs is not None and 0 < item.base_length < session.open.prompt_length:
            token_ids = (session.text.token_ids[-1], *token_ids)
            self._runner.sequences.truncate(session.text, item.base_length - 1)
        return ScoreJob(session.open, item, session.text, token_ids, base)

    def advance(self, shares: Sequence[tuple[ScoreJob, int]]) -> Pass[Scores]:
        """One forward over so many tokens of each job; jobs whose last tokens were among them are answered."""
        return self.start(shares).finish()

    @property
    def is_asynchronous(self) -> bool:
        """Whether a forward goes on by itself once it was started; a CPU does all of it at once."""
        return self._runner.device.type == "cuda"

    def start(self, shares: Sequence[tuple[ScoreJob, int]]) -> ScoringFlight:
        """``advance`` in two halves."""
        return ScoringFlight(self._runner, shares)

    def foresee(self, session: TargetSession, answer: Scores) -> Score | None:
        """The next plain step, where the answer says by itself which token comes next and does not end the session."""
        token_id, base = next_token(answer.form), answer.base_length
        opened = session.open
        if token_id is None or token_id in opened.eos_token_ids or session.text.length != base:
            return None
        if base + 1 >= opened.max_length:  # the token after it is the last, and nobody asks what follows that
            return None
        prefix_hash = self._runner.sequences.prefix_hash(session.text, base)
        return Score(answer.session, answer.generation, base, prefix_hash, (token_id,))

    def is_foreseen(self, item: Score, foreseen: Score) -> bool:
        """Whether an item asks for just what was foreseen."""
        return (
            item.token_ids == foreseen.token_ids
            and item.base_length == foreseen.base_length
            and item.prefix_hash == foreseen.prefix_hash
            and not item.draft_token_ids
            and item.support is None
        )

    def answer_to(self, item: Score, answer: Scores) -> Scores:
        """What was answered to the foreseen item, as the answer to the one that came."""
        return replace(answer, generation=item.generation)


class ScoringFlight:
    """One forward, and the scoring of those whose last tokens are among its, both started."""

    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, shares: Sequence[tuple[ScoreJob, int]]) -> None:
        self._jobs = [job for job, _ in shares]
        self._rows = _lay_out(shares)
        self._logits = runner.forward([_forward_row(row) for row in self._rows], as_computed=True)
        # Without it the forward's time would be booked on whoever first looks at its result.
        self._forward = Mark(runner.device)
        self._finished = [row for row in self._rows if row.is_last]
        # Started before the forward has ended: preparing it costs the device no time.
        self._scoring = _begin(self._logits, self._finished) if self._finished else None

    def is_done(self) -> bool:
        """Whether the forward has ended."""
        return self._forward.is_reached()

    @torch.inference_mode()
    def finish(self) -> Pass[Scores]:
        """Wait for it; called once."""
        self._forward.wait()
        computed = time.perf_counter_ns()
        for row in self._rows:
            _take_prompt_logprobs(row, self._logits)
            row.job.num_fed += row.share
        outcomes = self._scoring.outcomes() if self._scoring else []
        finished = zip(self._finished, outcomes, strict=True)
        answers = {id(row.job): _answer(row.job, outcome) for row, outcome in finished}
        return Pass(results=[answers.get(id(job)) for job in self._jobs], computed_ns=computed)


def next_token(form: ScoreForm) -> int | None:
    """The token that follows a step without drafts under every rule that draws it in the target; None: it is drawn in
    the coordinator, or there are drafts to judge.
    """
    match form:
        case TokenScores(token_ids=(token_id,)):
            return token_id
        case SparseScores(outside_token_ids=ids) if len(ids) == 1 and ids[0] >= 0:
            return int(ids[0])
        case TypicalScores(bonus_token_id=token_id, entropies=entropies) if not len(entropies):
            return token_id
    return None


def check_score(opened: Open, item: Score, *, vocab_size: int) -> None:
    """Raise ``InvalidRequestError`` naming the field for which an item cannot be scored."""
    _require(item.base_length >= 0, "base_length", "must not be negative")
    _require(bool(item.token_ids), "token_ids", "must hold at least one token")
    base, num_drafts = item.base_length + len(item.token_ids), len(item.draft_token_ids)
    _require(
        base <= opened.max_length, "token_ids", f"{base} tokens pass the {opened.max_length} the session was opened for"
    )
    _require(
        base + num_drafts <= opened.max_length,
        "draft_token_ids",
        f"{num_drafts} drafts after {base} tokens pass the {opened.max_length} the session was opened for",
    )
    check_ids("token_ids", item.token_ids, vocab_size)
    check_ids("draft_token_ids", item.draft_token_ids, opened.num_token_ids)
    if needs_support(opened) and num_drafts:
        _check_support(opened, item.support, num_drafts)


def needs_support(opened: Open) -> bool:
    """Whether the answer is about the ids of a support."""
    sampled = opened.sampling.temperature > 0
    return sampled and opened.acceptance_method is AcceptanceMethod.REJECTION and not opened.dense


def _check_support(opened: Open, support: Support | None, num_drafts: int) -> None:
    if support is None:
        raise InvalidRequestError("support", "is needed for rejection with draft tokens")
    counts = support.counts
    fits = len(counts) == num_drafts and bool((counts >= 0).all()) and int(counts.sum()) == len(support.token_ids)
    _require(
        fits, "support", f"{len(counts)} counts over {len(support.token_ids)} ids do not fit {num_drafts} draft tokens"
    )
    check_ids("support", (support.token_ids.min(initial=0), support.token_ids.max(initial=0)), opened.num_token_ids)


def _begin(logits: torch.Tensor, finished: Sequence[_Rows]) -> Scoring:
    return begin_scoring(_score_logits(logits, finished), [_request(row.job) for row in finished])


def _lay_out(shares: Sequence[tuple[ScoreJob, int]]) -> list[_Rows]:
    """Rows that are only scored come first, so that their logits stand together and need not be copied."""
    rows: list[_Rows] = []
    start = 0
    for job, share in sorted(shares, key=lambda entry: entry[0].num_prompt_rows > 0):
        num_prompt_rows = min(share, job.num_prompt_rows)
        num_logits = share if num_prompt_rows else job.num_last * (share == job.num_left)
        rows.append(_Rows(job, share, start, num_logits, num_prompt_rows))
        start += num_logits
    return rows


def _forward_row(row: _Rows) -> ForwardRow:
    job = row.job
    return ForwardRow(job.sequence, job.token_ids[job.num_fed : job.num_fed + row.share], row.num_logits)


def _take_prompt_logprobs(row: _Rows, logits: torch.Tensor) -> None:  # logits [N, V]
    count, job = row.num_prompt_rows, row.job
    if count:
        known = job.token_ids[job.num_fed + 1 : job.num_fed + 1 + count]
        job.prompt_logprobs += prompt_logprobs(logits[row.start : row.start + count].float(), known, job.open)


def _score_logits(logits: torch.Tensor, rows: Sequence[_Rows]) -> torch.Tensor:  # [N, V] -> [sum(K+1), V]
    spans = [(row.score_start, row.score_start + row.job.num_last) for row in rows]
    if all(end == start for (_, end), (start, _) in itertools.pairwise(spans)):
        return logits[spans[0][0] : spans[-1][1]]
    return torch.cat([logits[start:end] for start, end in spans])


def _request(job: ScoreJob) -> ScoreRequest:
    return ScoreRequest(
        open=job.open,
        tokens=job.sequence.token_ids,
        base=job.base,
        draft_token_ids=job.score.draft_token_ids,
        support=job.score.support if needs_support(job.open) else None,
    )


def _answer(job: ScoreJob, outcome: ScoreOutcome) -> Scores | OutriderError:
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
    )


def _require(holds: bool, name: str, message: str) -> None:
    if not holds:
        raise InvalidRequestError(name, message)
