"""Executor of the target: scores committed and drafted tokens with the large model.

Owns which tokens an item stands for, and which plain step follows an answer. The forward and the reading of its logits
are in ``outrider_target.scoring_forward``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from outrider.batched import ScoreBatch
from outrider.errors import IntegrityError, InvalidRequestError
from outrider.kernels.device_stream import to_device
from outrider.kv_cache import KVSequence
from outrider.model_executor.model_runner import ModelRunner, PlannedBatch
from outrider.ports import Score, Scores
from outrider.sampling.session import SessionSampling
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.sessions import are_all
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import ExecutorOutput, InFlightForward, QueuedForward
from outrider.serving.paged_executor import PagedExecutor
from outrider.serving.session import Session
from outrider.types import JudgingRule, ScoreForm, SparseScores, TokenScores, TypicalScores, are_within, part_of
from outrider_target.jobs import ScoreJob, check_layers, check_score
from outrider_target.planes import TargetPlanes
from outrider_target.scoring_forward import ScoringForward
from outrider_target.step_rows import SessionBatch, forward_rows, layers_of

TargetSession = Session[KVSequence]
COLUMN_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED, JudgingRule.REJECTION)


class TargetExecutor(PagedExecutor[KVSequence, Score, ScoreJob, Scores]):
    """Scores with one model. On a GPU forwards are asynchronous, and plain steps may be queued behind each other."""

    def __init__(self, runner: ModelRunner, planes: TargetPlanes | None = None) -> None:
        """``planes`` take hidden states to drafts; None: they go inline."""
        super().__init__(runner.sequences)
        self.runner, self.planes = runner, planes

    def kv_of(self, job: ScoreJob) -> KVSequence:
        """The job's sequence."""
        return job.sequence

    def check(self, session: TargetSession, item: Score) -> Scores | None:
        """Raise ``InvalidRequestError`` for an item that cannot be served; none is answered without a forward."""
        check_layers(session.open, num_layers=self.runner.config.num_layers)
        check_score(session.open, item, vocab_size=self.runner.config.vocab_size)
        if session.open.sampling.grammar is not None and self.runner.sampler.grammars is None:
            raise InvalidRequestError("grammar", "cannot be used, since the target has no tokenizer")
        return None

    def num_adoptable(self, session: TargetSession, item: Score) -> int:
        """Positions whose hidden states are wanted are computed, cached or not."""
        adoptable = super().num_adoptable(session, item)
        return adoptable if item.hidden_states_from is None else min(adoptable, item.hidden_states_from)

    def begin(self, session: TargetSession, item: Score) -> ScoreJob:
        """The item's tokens, less what was cached of them. The last one kept comes first if a prompt token's logprob
        has to be read after it.
        """
        token_ids = part_of(item.token_ids, session.sequence.length - item.num_kept_tokens, len(item.token_ids))
        if item.draft_token_ids:
            token_ids += item.draft_token_ids
        base = item.num_kept_tokens + len(item.token_ids)
        if session.open.num_prompt_logprobs is not None and 0 < item.num_kept_tokens < session.open.prompt_length:
            token_ids = (session.sequence.token_ids[-1], *token_ids)
            self.runner.sequences.truncate(session.sequence, item.num_kept_tokens - 1)
        return ScoreJob(self._sampling_of(session), item, session.sequence, token_ids, base, session.link_id)

    def execute(self, batch: Sequence[tuple[ScoreJob, int]]) -> ExecutorOutput[Scores]:
        """One forward over this many tokens of each job; jobs whose last tokens were among them are answered."""
        return self.start(batch).finish()

    @property
    def is_asynchronous(self) -> bool:
        """True if a forward runs on after it was started; a CPU does all of it at once."""
        return self.runner.device.type == "cuda"

    def start(self, batch: Sequence[tuple[ScoreJob, int]]) -> ScoringForward:
        """``execute`` in two halves."""
        return ScoringForward(self.runner, batch, planes=self.planes)

    def may_follow(self, forward: InFlightForward[Scores]) -> bool:
        """A chunk of prompts from which nothing is read; on GPUs."""
        return self.runner.takes_drawn and isinstance(forward, ScoringForward) and forward.reads_nothing

    def _sampling_of(self, session: TargetSession) -> SessionSampling:
        """The session's sampling state, made at its first item."""
        state = session.executor_state
        if not isinstance(state, SessionSampling):
            state = session.executor_state = SessionSampling(session.open, self.runner.sampler.grammars)
        return state

    def look_ahead(self, job: ScoreJob) -> None:
        """Hash the tokens for the prefix cache and for the next item."""
        self.runner.sequences.hash_ahead(job.sequence)

    # Columns.

    def is_decoding(self, session: TargetSession) -> bool:
        """Sessions whose scores are tokens, or sparse."""
        return session.open.judging_rule in COLUMN_RULES and isinstance(session.executor_state, SessionSampling)

    def session_rows(self, sessions: Sequence[TargetSession]) -> SessionBatch:
        """Session data for forwards and kernels."""
        sequences, samplings = [session.sequence for session in sessions], list(map(self._sampling_of, sessions))
        return SessionBatch.of(sequences, samplings, self.runner.config.vocab_size)

    @property
    def truncates_batch(self) -> bool:
        """A forward starts before its sequences are brought up to date."""
        return True

    def takes_batch(self, step: DecodeBatch) -> bool:
        """True if every item has drafts and keeps to the bounds of ``check_score``, pages suffice for certain, and all
        scores are tokens, or all are sparse.
        """
        return self._takes_rows(step) and self.takes_drafts(step)

    def _takes_rows(self, step: DecodeBatch) -> bool:
        """``takes_batch`` but for the draft tokens and their supports."""
        batched, rows = step.batched, step.rows
        if not isinstance(batched, ScoreBatch) or rows.is_sparse is None:
            return False
        counts, lengths = batched.counts.tolist(), step.draft_lengths.tolist()
        if min(lengths) < (0 if batched.begins_next else 1) or min(counts) < 1:
            return False
        if batched.hidden_states_from is not None and not (
            rows.layers and np.array_equal(step.kept, batched.hidden_states_from)  # of just what every item brings
        ):
            return False
        return (
            are_within(batched.token_ids.tolist(), 0, self.runner.config.vocab_size - 1)
            and are_all(step.bases + step.draft_lengths <= step.own.max_lengths)
            and self.runner.sequences.surely_fit(len(counts), max(map(operator.add, counts, lengths)))
            and self.runner.sequences.have_states(rows.sequences, step.kept)
        )

    def takes_drafts(self, step: DecodeBatch) -> bool:
        """True if draft tokens and supports keep to the bounds of ``check_score``."""
        batched, rows = step.batched, step.rows
        if not isinstance(batched, ScoreBatch):
            return False
        if rows.is_sparse and not _has_whole_supports(batched, rows.num_token_ids):
            return False
        return are_within(batched.draft_token_ids.tolist(), 0, rows.num_token_ids - 1)

    def plan_draft_batch(self, step: DecodeBatch) -> PlannedBatch | None:
        """The forward but for its draft tokens, with its KV pages."""
        batched = step.batched
        if not isinstance(batched, ScoreBatch) or not self._takes_rows(step):
            return None
        unknown = np.zeros(int(step.draft_lengths.sum()), dtype=np.int64)
        return self.runner.plan_batch(forward_rows(step, batched, unknown), layers_of(batched, step.rows))

    def drop_plan(self, plan: PlannedBatch) -> None:
        """Give the pages back."""
        self.runner.drop_plan(plan)

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[ScoreJob, int]] = ()
    ) -> ScoringForward:
        """A forward over a step, with jobs beside it."""
        return ScoringForward(self.runner, batch, step, planes=self.planes)

    # Decode steps that are computed before they are asked for.

    def may_be_plain(self, session: TargetSession) -> bool:
        """Sessions whose next token is drawn from the model's own logits."""
        state = session.executor_state
        return isinstance(state, SessionSampling) and state.metadata.may_be_row

    def amend_plain(self, sessions: Sequence[TargetSession], token_ids: Sequence[int]) -> None:
        """Tokens of a queued step, now that they are known. Their KV is where the forward has put it."""
        self.runner.sequences.amend_last([session.sequence for session in sessions], token_ids)

    # Lookahead.

    def next_step(self, session: TargetSession, answer: Scores) -> Score | None:
        """The next plain step, where the answer says by itself which token comes next and does not end the session."""
        return self._plain_step(session, answer) if session.sequence.length == answer.base_length else None

    def _plain_step(self, session: TargetSession, answer: Scores) -> Score | None:
        token_id, base = next_token(answer.form), answer.base_length
        opened = session.open
        if token_id is None or token_id in opened.eos_token_ids:
            return None
        if base + 1 >= opened.max_length:  # the token after it is the last, and what follows that is not asked for
            return None
        prefix_hash = self.runner.sequences.prefix_hash(session.sequence, base)
        return Score(answer.session, answer.generation, base, prefix_hash, (token_id,))

    def queue(
        self, forward: InFlightForward[Scores], step: LookaheadStep | None = None
    ) -> QueuedForward[ScoreJob, Scores] | None:
        """A forward over the tokens that ``forward`` will have drawn, started before it has ended."""
        if not isinstance(forward, ScoringForward) or not self.runner.takes_drawn:
            return None
        if step is not None:
            return self._queue_step(forward, step)
        queued = forward.queue_next() if self._has_room_after(forward) else None
        return None if queued is None else QueuedForward(queued, queued.jobs, queued.indices)

    def _queue_step(self, forward: ScoringForward, step: LookaheadStep) -> QueuedForward[ScoreJob, Scores] | None:
        """None unless one page for each session is free, and the device knows the tokens."""
        if len(step) > self.num_pages_free or (drawn := forward.drawn()) is None:
            return None
        if len(step) < len(drawn):
            drawn = drawn[to_device(step.indices, drawn.device)]
        return QueuedForward(ScoringForward(self.runner, step=step, drawn=drawn))

    def _has_room_after(self, forward: ScoringForward) -> bool:
        """True if every session of a forward may take one more token; none is preempted for what was not asked for."""
        manager = self.runner.sequences
        return sum(manager.pages_needed(job.sequence, 1) for job in forward.jobs) <= manager.num_free

    def resolve(
        self, queued: QueuedForward[ScoreJob, Scores], index: int, session: TargetSession, answer: Scores
    ) -> Score | None:
        """The item that row ``index`` of ``queued`` turns out to be; None: its token is not what follows the answer,
        and is taken back.
        """
        forward, base = queued.forward, answer.base_length
        if not isinstance(forward, ScoringForward):
            raise IntegrityError("a forward of another executor")
        item = self._plain_step(session, answer)
        if item is None or item.token_ids[0] != forward.fed_token(index):
            self.runner.sequences.truncate(session.sequence, base)
            return None
        # Its KV is where the forward has put it.
        self.runner.sequences.amend(session.sequence, base, item.token_ids)
        job = queued.jobs[index]
        job.score, job.token_ids = item, item.token_ids
        return item

    def matches(self, item: Score, prepared: Score) -> bool:
        """True if an item asks for just the plain step that was prepared."""
        return (
            item.token_ids == prepared.token_ids
            and item.num_kept_tokens == prepared.num_kept_tokens
            and item.prefix_hash == prepared.prefix_hash
            and not item.draft_token_ids
            and item.support is None
            and item.hidden_states_from is None
        )


def _has_whole_supports(batched: ScoreBatch, num_token_ids: int) -> bool:
    """True if every draft token of every session has a support, of ids below ``num_token_ids``."""
    counts, ids = batched.support_counts, batched.support_token_ids
    if counts is None or ids is None or not ids.size:
        return False
    if counts.size != batched.draft_token_ids.size or int(counts.sum()) != ids.size:
        return False
    return int(counts.min()) > 0 and int(ids.min()) >= 0 and int(ids.max()) < num_token_ids


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
