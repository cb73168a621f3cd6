"""Scoring: what becomes of a ``Score`` between its arrival and its answer.

Owns which tokens an item stands for, and which item will follow an answer. Its forward and the reading of its logits
are ``outrider_target.flight``'s; who goes first is ``outrider.serving.token_budget``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import IntegrityError
from outrider.kv_cache import KVSequence
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Score, Scores
from outrider.sampling.session import SessionSampling
from outrider.serving.executor import ExecutorOutput, InFlightForward, QueuedForward
from outrider.serving.session_table import Session
from outrider.types import ScoreForm, SparseScores, TokenScores, TypicalScores
from outrider_target.flight import ScoringFlight
from outrider_target.jobs import ScoreJob, check_score

TargetSession = Session[KVSequence]


class Scorer:
    """The target's ``outrider.serving.executor.AsyncExecutor`` over one model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self._runner.sequences.pool.num_free

    def num_pages_needed(self, job: ScoreJob, share: int) -> int:
        """Free KV pages for so many of the job's tokens."""
        return self._runner.sequences.pages_needed(job.sequence, share)

    def check(self, session: TargetSession, item: Score) -> Scores | None:
        """Raise ``InvalidRequestError`` for an item that cannot be served; none is answered without a forward."""
        check_score(session.open, item, vocab_size=self._runner.config.vocab_size)
        return None

    def begin(self, session: TargetSession, item: Score) -> ScoreJob:
        """The item's tokens, less what was cached of them. The last one kept comes first if a prompt token's logprob
        has to be read after it.
        """
        token_ids = item.token_ids[session.text.length - item.base_length :] + item.draft_token_ids
        base = item.base_length + len(item.token_ids)
        if session.open.num_prompt_logprobs is not None and 0 < item.base_length < session.open.prompt_length:
            token_ids = (session.text.token_ids[-1], *token_ids)
            self._runner.sequences.truncate(session.text, item.base_length - 1)
        return ScoreJob(_sampling_of(session), item, session.text, token_ids, base)

    def advance(self, shares: Sequence[tuple[ScoreJob, int]]) -> ExecutorOutput[Scores]:
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
        return self._plain_step(session, answer) if session.text.length == answer.base_length else None

    def _plain_step(self, session: TargetSession, answer: Scores) -> Score | None:
        token_id, base = next_token(answer.form), answer.base_length
        opened = session.open
        if token_id is None or token_id in opened.eos_token_ids:
            return None
        if base + 1 >= opened.max_length:  # the token after it is the last, and nobody asks what follows that
            return None
        prefix_hash = self._runner.sequences.prefix_hash(session.text, base)
        return Score(answer.session, answer.generation, base, prefix_hash, (token_id,))

    def follow(self, flight: InFlightForward[Scores]) -> QueuedForward[ScoreJob, Scores] | None:
        """The forward over the tokens that this one will have drawn, started before it has ended."""
        if not isinstance(flight, ScoringFlight) or not self._has_room_after(flight):
            return None
        if (following := flight.follow()) is None:
            return None
        return QueuedForward(following, following.jobs, following.places)

    def _has_room_after(self, flight: ScoringFlight) -> bool:
        """Whether every session of a flight may take one more token; nobody is preempted for what was not asked for."""
        manager = self._runner.sequences
        return sum(manager.pages_needed(job.sequence, 1) for job in flight.jobs) <= manager.pool.num_free

    def confirm(
        self, following: QueuedForward[ScoreJob, Scores], index: int, session: TargetSession, answer: Scores
    ) -> Score | None:
        """The item that row ``index`` of ``following`` turns out to be; None: what it was computed over is not what
        follows the answer, and is taken back.
        """
        flight, base = following.flight, answer.base_length
        if not isinstance(flight, ScoringFlight):
            raise IntegrityError("a flight of another stage")
        item = self._plain_step(session, answer)
        if item is None or item.token_ids[0] != flight.fed_token(index):
            self._runner.sequences.truncate(session.text, base)
            return None
        # Its KV is where the flight has put it.
        self._runner.sequences.amend(session.text, base, item.token_ids)
        job = following.jobs[index]
        job.score, job.token_ids = item, item.token_ids
        return item

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


def _sampling_of(session: TargetSession) -> SessionSampling:
    """The session's sampling state, made at its first item."""
    state = session.executor_state
    if not isinstance(state, SessionSampling):
        state = session.executor_state = SessionSampling(session.open)
    return state


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
