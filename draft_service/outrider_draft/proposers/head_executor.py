"""Executor of draft heads that draft one token after the other, with a KV cache of their own (EAGLE-3).

Owns bringing a session's pairs up to date and the draft loop. Pairs of committed text are always made of the target's
states: what was drafted is forgotten after each proposal, since the head's own states stood in for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.batched import ExtendBatch, StateBatch
from outrider.errors import OutriderError
from outrider.kv_cache import KVSequence
from outrider.model_executor.device_setup import keep_to_set_threads
from outrider.model_executor.draft_heads.runner import PAIR_OFFSET, DraftHeadRunner
from outrider.model_executor.draft_heads.state_rows import HeadStateRows
from outrider.model_executor.draft_loop import MAX_STEPS, DraftMetadata, DraftRow
from outrider.model_executor.draft_loop.results import Draws
from outrider.model_executor.input_batch import ForwardRow
from outrider.ports import Extend, Proposal
from outrider.sampling.parameters import needs_history
from outrider.sampling.rows import LogitRow
from outrider.sampling.session import SessionSampling
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.sessions import Ints
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import ExecutorOutput
from outrider.serving.paged_executor import PagedExecutor
from outrider.serving.session import Session
from outrider.types import JudgingRule
from outrider_draft.batch_forward import DraftSessions, LoopForward
from outrider_draft.items import check_extend, check_hidden_states, keeps_bounds, proposal_length, proposal_lengths
from outrider_draft.proposers.head_batch import ItemsForward, begin_loop
from outrider_draft.proposers.passes import joined, single
from outrider_draft.proposers.state_heads import as_tensor
from outrider_draft.proposers.state_sequences import StateSequence, StateSequences

HeadSession = Session[StateSequence]
_MAX_FED = 64
"""Pairs of a row of arrays where there are no loops."""
_MAX_KEPT_BYTES = 1 << 19
"""Bound on a step's states that stay with a session for their last row: less time than a copy for each session."""


@dataclass(slots=True)
class HeadState:
    """State of one session."""

    sampling: SessionSampling
    metadata: DraftMetadata | None = None
    """Sampling metadata for drawing its tokens in one launch; None: they are drawn one by one."""
    last_state: torch.Tensor | None = None
    """[1, F] of the last pair, which is computed again when nothing new comes with the next item."""


@dataclass(slots=True)
class HeadJob:
    """One ``Extend`` under way."""

    extend: Extend
    sequence: StateSequence
    state: HeadState
    base: int
    draft_length: int
    token_ids: tuple[int, ...]
    """Token ids of the missing pairs."""
    states: torch.Tensor | None
    """[N, F] of those pairs; None: the head says how much it holds, and waits for states."""
    num_left: int
    num_last: int = 1
    metadata: DraftMetadata | None = None
    """Sampling metadata for drawing its tokens in one launch; None: they are drawn one by one."""
    drawn: list[int] = field(default_factory=list)
    draws: list[Draws] = field(default_factory=list)

    def take(self, count: int) -> tuple[tuple[int, ...], torch.Tensor]:
        """The next ``count`` pairs, to be computed now: tokens, and states [count, F]."""
        assert self.states is not None  # noqa: S101 - a job with pairs has states
        start = len(self.token_ids) - self.num_left
        self.num_left -= count
        return self.token_ids[start : start + count], self.states[start : start + count]

    @property
    def num_pairs_left(self) -> int:
        """Pairs to be computed."""
        return 0 if self.states is None or not self.token_ids else self.num_left

    @property
    def kv(self) -> KVSequence:
        """KV cache of its pairs."""
        if self.sequence.kv is None:
            raise TypeError("a job with pairs has a KV sequence")
        return self.sequence.kv


class HeadExecutor(PagedExecutor[StateSequence, Extend, HeadJob, Proposal]):
    """Proposes with one head. Forwards are synchronous. On a GPU, sessions that lack few pairs compute them and draw
    all their tokens in one launch.
    """

    def __init__(self, runner: DraftHeadRunner) -> None:
        super().__init__(runner.sequences)
        self.runner = runner
        self.sequences = StateSequences(runner.sequences)
        config = runner.head.config
        self.width = config.target_hidden_size * len(config.hidden_state_layers)
        """Numbers of the hidden states of a token."""
        self._vocab_size = config.layer.vocab_size

    def kv_of(self, job: HeadJob) -> KVSequence | None:
        """The sequence of the job's pairs."""
        return job.sequence.kv

    def num_written(self, job: HeadJob, num_tokens: int) -> int:
        """Number of KV entries that ``num_tokens`` of the job's pairs write, and those that it drafts with the last of
        them.
        """
        count = min(num_tokens, job.num_pairs_left)
        return count + self.num_drafted(job) if count and count == job.num_left else count

    def num_drafted(self, job: HeadJob) -> int:
        """Tokens that a job writes when its pairs are computed."""
        return max(0, job.draft_length - 1)

    def check(self, session: HeadSession, item: Extend) -> Proposal | None:
        """An empty proposal for a session that outgrew the head; ``InvalidRequestError`` for a bad item."""
        check_extend(session.open, item, vocab_size=self._vocab_size)
        if item.hidden_states is not None:
            check_hidden_states(item, item.hidden_states, width=self.width)
        base = item.num_kept_tokens + len(item.token_ids)
        return Proposal(item.session, item.generation, base, ()) if base > session.reserved_length else None

    def begin(self, session: HeadSession, item: Extend) -> HeadJob:
        """The pairs that the sequence lacks; with nothing new, its last pair again."""
        sequence, state = session.sequence, self._state_of(session)
        base = item.num_kept_tokens + len(item.token_ids)
        length = proposal_length(session.open, item, reserved_length=session.reserved_length)
        if item.hidden_states is None:
            if item.token_ids or state.last_state is None or sequence.length < 2:
                return HeadJob(item, sequence, state, sequence.length, 0, (), None, 1)
            token_ids: tuple[int, ...] = (sequence.text.token_ids[-1],)
            states = state.last_state
            self.sequences.truncate(sequence, base - 1)
        else:
            if not sequence.length:
                sequence.text.extend(item.token_ids[:1])
                self.sequences.begin(sequence, item.token_ids[0])
            given = as_tensor(item.hidden_states, device=self.runner.device, dtype=self.runner.head.dtype)
            token_ids = item.token_ids[sequence.length - item.num_kept_tokens :]
            states = given[given.shape[0] - len(token_ids) :]
        metadata = state.metadata if 0 < length <= MAX_STEPS else None
        return HeadJob(
            item, sequence, state, base, length, token_ids, states, max(1, len(token_ids)), metadata=metadata
        )

    @torch.inference_mode()
    def execute(self, batch: Sequence[tuple[HeadJob, int]]) -> ExecutorOutput[Proposal]:
        """One loop over the jobs that lack few pairs, and one forward over this many pairs of each other job, with the
        draft of those whose last pair was among them.
        """
        keep_to_set_threads()
        asked = [(job, min(share, job.num_pairs_left)) for job, share in batch if job.num_pairs_left]
        looped = [job for job, share in asked if self._fits_loop(job, share)]
        fed = [(job, _leave_last(job, share)) for job, share in asked if not self._fits_loop(job, share)]
        if looped:
            self._run_loop(looped)
        if fed:
            self._feed(fed)
        for job, share in batch:
            if not job.token_ids:
                job.num_left -= share
        results = [None if job.num_left else _answer(job) for job, _ in batch]
        used_graph = bool(looped) and not fed and self.runner.used_graph
        return ExecutorOutput(results, time.perf_counter_ns(), used_graph)

    # Proposals that are begun before they are asked for.

    reads_states = True

    def follows_verdicts(self, session: HeadSession) -> bool:
        """Sessions whose tokens decide nothing but what the target computes next."""
        opened = session.open
        if opened.in_turn or opened.sampling.grammar is not None or not self.is_decoding(session):
            return False
        return opened.judging_rule in (JudgingRule.GREEDY, JudgingRule.COUPLED)

    # Columns.

    def is_decoding(self, session: HeadSession) -> bool:
        """Sessions that have pairs."""
        return isinstance(session.executor_state, HeadState) and session.sequence.kv is not None

    def session_rows(self, sessions: Sequence[HeadSession]) -> DraftSessions | None:
        """Session data for drawing tokens; None without loops."""
        if not self.runner.max_prefill:
            return None
        kvs = [session.sequence.kv for session in sessions if session.sequence.kv is not None]
        return DraftSessions.of(sessions, kvs, [PAIR_OFFSET] * len(kvs))

    @property
    def truncates_batch(self) -> bool:
        """True with loops: texts hold no drafts, so that an item of arrays keeps all of its text."""
        return self.runner.max_prefill > 0

    def takes_batch(self, step: DecodeBatch) -> bool:
        """True if every item keeps to ``check_extend`` and brings its tokens' states, and pages suffice for certain."""
        batched, lengths = step.batched, self.lengths(step).tolist()
        if not isinstance(batched, ExtendBatch) or not self._has_states(step, batched.states):
            return False
        counts, max_prefill = batched.counts.tolist(), self.runner.max_prefill
        if not 1 <= min(lengths) <= max(lengths) <= MAX_STEPS or not min(counts) >= 1:
            return False
        if max(counts) > (max_prefill or _MAX_FED) or (max_prefill and len(step) > self.runner.max_draft_rows):
            return False
        most = max(counts) + max(lengths) + 1  # a block has one query more
        if len({session.open.judging_rule.needs_evidence for session in step.sessions}) > 1:
            return False  # proposals have evidence of one form, or none has
        return keeps_bounds(step, vocab_size=self._vocab_size) and self.runner.sequences.surely_fit(len(step), most)

    def _has_states(self, step: DecodeBatch, states: StateBatch | None) -> bool:
        """True if the states were fetched, or will be at the start of a begun step, and are of the positions that the
        items must bring.
        """
        if states is None or states.width != self.width or (states.tensor is None and step.is_asked):
            return False
        starts, counts = (step.kept - 1).tolist(), step.batched.counts.tolist()
        return bool(states.starts.tolist() == starts and states.counts.tolist() == counts)

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[HeadJob, int]] = ()
    ) -> LoopForward | ItemsForward:
        """A loop over all of them, or what single items would lead to."""
        batched = step.batched if isinstance(step, DecodeBatch) else None
        if not isinstance(step, DecodeBatch) or not isinstance(batched, ExtendBatch) or batched.states is None:
            raise TypeError("a head reads states")
        return begin_loop(self, step, batched.states) if self.runner.max_prefill else ItemsForward(self, step)

    def lengths(self, step: DecodeBatch) -> Ints:  # [B]
        """``proposal_length`` of each."""
        return proposal_lengths(step)

    # Forwards.

    def _fits_loop(self, job: HeadJob, share: int) -> bool:
        return job.metadata is not None and share == job.num_left <= self.runner.max_prefill

    def _state_of(self, session: HeadSession) -> HeadState:
        state = session.executor_state
        if not isinstance(state, HeadState):
            opened = session.open
            loops = self.runner.max_prefill > 0
            argmax = self.runner.sampler.rules.takes_argmax
            metadata = DraftMetadata.of(opened, self._vocab_size, takes_argmax=argmax) if loops else None
            state = session.executor_state = HeadState(SessionSampling(opened), metadata)
        return state

    def _run_loop(self, jobs: Sequence[HeadJob]) -> None:
        rows: list[DraftRow] = []
        states: list[torch.Tensor] = []
        for job in jobs:
            token_ids, own = job.take(job.num_left)
            assert job.metadata is not None  # noqa: S101 - else it does not fit
            rows.append(DraftRow(job.metadata, job.kv, token_ids, job.draft_length, job.base, PAIR_OFFSET))
            states.append(own)
        drawn = self.runner.draft(rows, HeadStateRows(states))
        last_states = _last_of_each(states)
        for job, row, last, draws in zip(jobs, rows, last_states, drawn, strict=True):
            job.sequence.text.extend(row.token_ids)
            job.state.last_state = last
            job.draws.append(draws)
            self.sequences.keep_pairs(job.sequence, job.base - 1)

    def _feed(self, fed: Sequence[tuple[HeadJob, int]]) -> None:
        parts: list[torch.Tensor] = []
        rows: list[ForwardRow] = []
        for job, share in fed:
            token_ids, states = job.take(share)
            rows.append(ForwardRow(job.kv, list(token_ids), 0))
            parts.append(states)
        hidden, normed = self.runner.feed(rows, parts)
        drafting: list[HeadJob] = []
        indices: list[int] = []
        end = 0
        for (job, share), row, states in zip(fed, rows, parts, strict=True):
            end += share
            job.sequence.text.extend(row.token_ids)
            if not job.num_left:
                job.state.last_state = _last_of(states)
                if job.draft_length:
                    drafting.append(job)
                    indices.append(end - 1)
        if drafting:
            self._draft(drafting, hidden, normed, indices)

    def _draft(
        self, jobs: list[HeadJob], hidden: torch.Tensor, normed: torch.Tensor, indices: list[int]
    ) -> None:  # [T, H] each
        """Draw each job's tokens, one after the other; ``hidden`` at the jobs' ``indices`` stands in for the target's
        states.
        """
        begun = list(jobs)
        hidden, normed = _picked(hidden, indices), _picked(normed, indices)
        while jobs:
            logits = self.runner.head.logits(normed).float()
            drawn = self.runner.sampler.propose(logits, [_logit_row(job) for job in jobs])
            going = []
            for place, (job, one) in enumerate(zip(jobs, drawn, strict=True)):
                job.draws.append(single(one))
                if one.error is None:
                    job.drawn.append(one.token_id)
                    if len(job.drawn) < job.draft_length:
                        going.append(place)
            jobs = [jobs[place] for place in going]
            if jobs:
                rows = [ForwardRow(job.kv, job.drawn[-1:], 0) for job in jobs]
                hidden, normed = self.runner.forward(rows, _picked(hidden, going))
        for job in begun:
            self.sequences.keep_pairs(job.sequence, job.base - 1)


def _picked(rows: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Some rows, in order. A view of all or of one takes a tenth of the time that a copy by a list does."""
    if len(indices) == len(rows):
        return rows
    return rows[indices[0] :][:1] if len(indices) == 1 else rows[indices]


def _leave_last(job: HeadJob, share: int) -> int:
    """Pairs of a job's share that a forward appends: a share that ends in a loop leaves its last pair to that."""
    return min(share, job.num_left - 1) if job.metadata is not None else share


def _logit_row(job: HeadJob) -> LogitRow:
    text: Sequence[int] = job.sequence.text.token_ids
    if needs_history(job.state.sampling.open.sampling):
        text = [*text, *job.drawn]
    return LogitRow(job.state.sampling, text, job.base + len(job.drawn), job.base)


def _answer(job: HeadJob) -> Proposal | OutriderError:
    session, generation = job.extend.session, job.extend.generation
    error = job.draws[-1].error if job.draws else None
    if error is not None and not job.draws[-1].token_ids:
        job.draws.pop()
        if not job.draws:
            return error
    if not job.draws:
        return Proposal(session, generation, job.base, ())
    found = joined(job.draws)
    return Proposal(session, generation, job.base, found.token_ids, found.evidence)


def _last_of(states: torch.Tensor) -> torch.Tensor:
    """The last row of states [N, F], copied only where it would keep many others in memory."""
    last = states[-1:]
    return last if states.untyped_storage().nbytes() <= _MAX_KEPT_BYTES else last.clone()


def _last_of_each(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The last row of each part [n, F], in one copy where one is needed."""
    if len(parts) == 1:
        return [_last_of(parts[0])]
    return list(torch.cat([part[-1:] for part in parts]).split(1))  # type: ignore[no-untyped-call]
