"""Proposals from a small model.

Owns bringing a session's KV up to date and drawing its draft tokens, all sessions together, whatever round each is in.
Where the device can (``ModelRunner.draft``), sessions that are up to date but for a token or two draw all their tokens
in one launch. A forward before it takes the rest: prefill chunks, the text of sessions that lack more and draw in that
launch, and requests whose tokens are drawn from logits, one by one. How tokens are drawn and what is reported of it is
``outrider.sampling``'s; who goes first is ``outrider.serving.token_budget``'s.

After K drafted tokens the cache holds the committed ones and K - 1 of those drafted: what follows the last was
not asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outrider.batched import ExtendBatch
from outrider.config import DraftSettings
from outrider.errors import InvalidRequestError, OutriderError
from outrider.kernels.device_stream import mark_reached
from outrider.kv_cache import KVSequence
from outrider.limits import MAX_DRAFT_LENGTH
from outrider.model_executor.cost_profile import profile_draft
from outrider.model_executor.device_lock import device_lock
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.draft_loop import MAX_STEPS, MAX_UNCOMPUTED_TOKENS, DraftMetadata, DraftRow
from outrider.model_executor.draft_loop.batched import DraftBatch
from outrider.model_executor.draft_loop.results import Draws
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Open, Proposal
from outrider.sampling.rows import LogitRow
from outrider.sampling.session import SessionSampling
from outrider.serving.decode.begun import asks_for_same
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import ExecutorOutput
from outrider.serving.paged_executor import PagedExecutor
from outrider.serving.session import Session
from outrider.structured_output import GrammarCompiler, PositionMasks, made_within
from outrider.types import JudgingRule, ModelDescription, StepCost, part_of
from outrider_draft.batch_forward import DraftSessions, LoopForward
from outrider_draft.items import check_extend, proposal_length
from outrider_draft.proposers.passes import joined, single
from outrider_draft.proposers.registry import LoadHooks, ServedProposer
from outrider_draft.proposers.tail_sequences import TailSequence, TailSequences, longest_tail

DraftSession = Session[TailSequence]


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """A draft model on its device, warmed up."""
    runner = open_runner(settings, progress=hooks.progress, on_failure=hooks.on_failure)
    description = describe_model(
        "draft", settings.model or "", runner, load_format=settings.load_format, name=settings.served_model_name
    )
    with device_lock(description.device_id, is_shared=True):
        runner.warm_up(hooks.capture_progress)
    return serve_model(
        ModelProposer(runner), replace(description, step_costs=_step_costs(runner, settings, description))
    )


def _step_costs(runner: ModelRunner, settings: DraftSettings, description: ModelDescription) -> tuple[StepCost, ...]:
    if not settings.cost_profile_s:
        return ()
    with device_lock(description.device_id):
        return profile_draft(
            runner,
            max_rows=settings.max_running_requests,
            max_length=settings.num_speculative_tokens,
            bound_s=settings.cost_profile_s,
        )


def serve_model(proposer: ModelProposer, description: ModelDescription) -> ServedProposer:
    """A proposer over a runner that is loaded."""
    runner = proposer.runner
    runner.sampler.use_grammars(GrammarCompiler.of(description))
    pool = runner.sequences.pool
    room = pool.num_pages * pool.page_size
    window = proposer.sequences.window
    if window is not None:
        description = replace(description, longest_prefill=longest_tail(window))
    return ServedProposer(proposer, proposer.sequences, description, room, runner, close=runner.close)


@dataclass(frozen=True, slots=True)
class DraftState:
    """Facts derived once from a session's ``Open``."""

    sampling: SessionSampling
    metadata: DraftMetadata | None
    """Sampling metadata for drawing its tokens in one launch; None: they are drawn one by one."""


@dataclass(slots=True)
class ProposalJob:
    """One ``Extend`` under way."""

    sampling: SessionSampling
    extend: Extend
    sequence: TailSequence
    metadata: DraftMetadata | None
    """Sampling metadata for drawing its tokens in one launch; None: they are drawn one by one."""
    base: int
    """Committed tokens."""
    draft_length: int
    """Tokens still wanted in all, after trimming."""
    token_ids: tuple[int, ...]
    """Tokens to be appended before the next token is drawn: committed tokens at first, then the token drawn last."""
    num_left: int
    """Number of tokens at the end that were not appended yet."""
    num_last: int = 1
    """Any prefill may be cut before its last token."""
    num_drawn: int = 0
    draws: list[Draws] = field(default_factory=list)
    """Pass by pass."""

    @property
    def kv(self) -> KVSequence:
        """KV cache of its sequence."""
        return self.sequence.kv

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """The next ``count`` tokens to be appended."""
        start = len(self.token_ids) - self.num_left
        return part_of(self.token_ids, start, start + count)

    def feed(self, count: int) -> None:
        """Progress of a job by ``count`` appended tokens."""
        self.num_left -= count

    def accept(self, draws: Draws) -> None:
        """Tokens were drawn, one or more; the last is to be appended if another is wanted."""
        self.draws.append(draws)
        self.num_drawn += len(draws.token_ids)
        self.token_ids, self.num_left = draws.token_ids[-1:], 1


class ModelProposer(PagedExecutor[TailSequence, Extend, ProposalJob, Proposal]):
    """Proposes with one model. Forwards are synchronous."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.sequences)
        self.runner = runner
        window = runner.config.attention_window
        self.sequences = TailSequences(runner.sequences, None if window is None else window.size)
        self.can_loop = runner.drafting is not None
        """True if the runner drafts in a loop."""
        self.max_rows = runner.max_draft_rows
        """Largest number of rows of a loop."""

    def kv_of(self, job: ProposalJob) -> KVSequence:
        """The sequence to which the job writes."""
        return job.kv

    def num_written(self, job: ProposalJob, num_tokens: int) -> int:
        """The job's tokens and, where one launch draws all, those that it draws."""
        return num_tokens + _num_drawn_after(job, num_tokens)

    def check(self, session: DraftSession, item: Extend) -> Proposal | None:
        """An empty proposal for a session that outgrew this model; ``InvalidRequestError`` for a bad item."""
        check_extend(session.open, item, vocab_size=self.runner.config.vocab_size)
        base = item.num_kept_tokens + len(item.token_ids)
        return Proposal(item.session, item.generation, base, ()) if base > session.reserved_length else None

    def begin(self, session: DraftSession, item: Extend) -> ProposalJob:
        """The item's tokens, less what was cached of them; without any, the last one kept is computed again, for what
        follows it is not stored.
        """
        token_ids = part_of(item.token_ids, session.sequence.length - item.num_kept_tokens, len(item.token_ids))
        if not token_ids:
            kv, kv_offset = session.sequence.kv, session.sequence.kv_offset
            if not kv.token_ids:
                raise InvalidRequestError(
                    "num_kept_tokens", f"the first {kv_offset} tokens were left out, and not computed"
                )
            token_ids = (kv.token_ids[-1],)
            self.runner.sequences.truncate(kv, item.num_kept_tokens - 1 - kv_offset)
        length = proposal_length(session.open, item, reserved_length=session.reserved_length)
        state = self._state_of(session)
        return ProposalJob(
            sampling=state.sampling,
            extend=item,
            sequence=session.sequence,
            metadata=state.metadata if length else None,
            base=item.num_kept_tokens + len(item.token_ids),
            draft_length=length,
            token_ids=token_ids,
            num_left=len(token_ids),
        )

    def execute(self, batch: Sequence[tuple[ProposalJob, int]]) -> ExecutorOutput[Proposal]:
        """One forward over this many tokens of each job, then one loop over those that can draw all their tokens. Jobs
        with more text than a loop takes in draw beside the others, not after them.
        """
        looped = [job for job, share in batch if job.metadata and share == job.num_left]
        brief = {id(job) for job in looped if job.num_left <= MAX_UNCOMPUTED_TOKENS}
        forwarded = [(job, _leave_last(job, share)) for job, share in batch if id(job) not in brief]
        drawing = [job for job, share in forwarded if share == job.num_left and job.draft_length]
        masks = {id(job): _masks_of(job) for job in drawing if job.sampling.open.sampling.grammar is not None}
        logits = self.runner.forward([_forward_row(job, share) for job, share in forwarded]) if forwarded else None
        self.runner.sampler.begin_masks(list(masks.values()), is_awaited=True)  # while the forward runs
        used_graph = [self.runner.used_graph] if forwarded else []
        for job, share in forwarded:
            job.feed(share)
        rows = {id(job): _draft_row(job, job.metadata) for job in looped if job.metadata}
        drawn = dict(zip(rows, self.runner.draft(list(rows.values())), strict=True)) if rows else {}
        used_graph += [self.runner.used_graph] if rows else []
        if not rows:
            # Without it the forward's time would be counted where its result is first read.
            mark_reached(self.runner.device)()
        computed = time.perf_counter_ns()
        if logits is not None:
            drawn |= self._draw(drawing, logits, masks)
        results = [_take(job, drawn[id(job)]) if id(job) in drawn else _answer_when_done(job) for job, _ in batch]
        masked_ns = made_within(list(masks.values()))
        return ExecutorOutput(results=results, computed_ns=computed, used_graph=all(used_graph), masked_ns=masked_ns)

    # Proposals that are begun before they are asked for.

    def follows_verdicts(self, session: DraftSession) -> bool:
        """Sessions whose tokens decide nothing but what the target computes next."""
        return _may_begin(session) and session.open.judging_rule in (JudgingRule.GREEDY, JudgingRule.COUPLED)

    def may_guess(self, session: DraftSession) -> bool:
        """Sessions under rejection whose evidence is what a loop draws from."""
        state = session.executor_state
        has_metadata = isinstance(state, DraftState) and state.metadata is not None and state.metadata.needs_evidence
        return has_metadata and _may_begin(session) and session.sequence.kv_offset == 0

    def matches(self, item: Extend, prepared: Extend) -> bool:
        """True if an item asks for what was begun."""
        return asks_for_same(item, prepared)

    # Columns.

    def is_decoding(self, session: DraftSession) -> bool:
        """Sessions whose tokens are drawn in one launch."""
        return isinstance(session.executor_state, DraftState) and session.executor_state.metadata is not None

    def session_rows(self, sessions: Sequence[DraftSession]) -> DraftSessions:
        """Session data for drawing tokens."""
        sequences = [session.sequence for session in sessions]
        return DraftSessions.of(
            sessions, [sequence.kv for sequence in sequences], [sequence.kv_offset for sequence in sequences]
        )

    @property
    def truncates_batch(self) -> bool:
        """A loop starts before its sequences are brought up to date."""
        return True

    def takes_batch(self, step: DecodeBatch) -> bool:
        """True if every item keeps to ``check_extend`` and fits one loop, pages suffice for certain, and all proposals
        have evidence, or none has.
        """
        batched, rows = step.batched, step.rows
        if not isinstance(batched, ExtendBatch) or not rows.metadata.is_uniform:
            return False
        heads = zip(batched.draft_lengths.tolist(), rows.longest, step.bases.tolist(), strict=True)
        lengths = [min(asked, limit - base) for asked, limit, base in heads]  # as ``proposal_length``
        counts, ids = batched.counts.tolist(), batched.token_ids.tolist()
        longest, most = max(counts), max(lengths)
        is_sound = (
            1 <= min(lengths) <= most <= MAX_STEPS
            and 1 <= min(counts) <= longest <= MAX_UNCOMPUTED_TOKENS
            and len(lengths) <= self.max_rows
            and 0 <= min(ids) <= max(ids) < self.runner.config.vocab_size
            and max(batched.draft_lengths.tolist()) <= MAX_DRAFT_LENGTH
        )
        step.asked = DraftBatch(rows.kvs, rows.metadata, step.bases.tolist(), ids, counts, lengths, rows.kv_offsets)
        step.asked.guessed_from = None if step.guessed_from is None else step.guessed_from.tolist()
        manager, kept = self.runner.sequences, np.array(step.asked.lengths)
        return is_sound and manager.surely_fit(len(lengths), longest + most) and manager.have_states(rows.kvs, kept)

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[ProposalJob, int]] = ()
    ) -> LoopForward:
        """A loop over all of them."""
        if not isinstance(step, DecodeBatch):
            raise TypeError("a draft proposes for columns alone")
        return LoopForward(step, self.runner.begin_draft(step.asked))

    def _state_of(self, session: DraftSession) -> DraftState:
        state = session.executor_state
        if not isinstance(state, DraftState):
            opened = session.open
            # A loop masks no tokens of grammars: masked passes take longer than the tokens that they save.
            metadata = self._metadata_of(opened) if self.can_loop else None
            state = session.executor_state = DraftState(SessionSampling(opened, self.runner.sampler.grammars), metadata)
        return state

    def _metadata_of(self, opened: Open) -> DraftMetadata:
        argmax = self.runner.sampler.rules.takes_argmax
        return DraftMetadata.of(opened, self.runner.config.vocab_size, takes_argmax=argmax)

    def _draw(
        self, jobs: Sequence[ProposalJob], logits: torch.Tensor, masks: Mapping[int, PositionMasks]
    ) -> dict[int, Draws]:
        if not jobs:
            return {}
        rows = [
            LogitRow(job.sampling, job.sequence.token_ids, job.sequence.length, job.base, masks.get(id(job)))
            for job in jobs
        ]
        drawn = self.runner.sampler.propose(logits, rows)
        return {id(job): single(token) for job, token in zip(jobs, drawn, strict=True)}


def _may_begin(session: DraftSession) -> bool:
    """True if proposals may be begun before they are asked for. A recurrent layer's state cannot go back behind what
    was begun in vain, and a target begins no steps of sessions with grammars.
    """
    opened = session.open
    return session.sequence.kv.state is None and not opened.in_turn and opened.sampling.grammar is None


def _num_drawn_after(job: ProposalJob, num_tokens: int) -> int:
    """Tokens that one launch writes after this many of the job's tokens: all that it draws but the last."""
    return max(0, job.draft_length - job.num_drawn - 1) if job.metadata and num_tokens == job.num_left else 0


def _leave_last(job: ProposalJob, share: int) -> int:
    """Tokens of a job's share that a forward appends: a share that ends in a loop leaves its last token to that."""
    return min(share, job.num_left - 1) if job.metadata else share


def _draft_row(job: ProposalJob, metadata: DraftMetadata) -> DraftRow:
    count = min(job.draft_length - job.num_drawn, MAX_STEPS)
    return DraftRow(metadata, job.kv, job.next_tokens(job.num_left), count, job.base, job.sequence.kv_offset)


def _masks_of(job: ProposalJob) -> PositionMasks:
    """Mask of the token that is drawn when the last tokens of a job are appended."""
    text = [*job.sequence.token_ids, *job.next_tokens(job.num_left)]
    start = min(job.sampling.open.prompt_length, len(text))
    return job.sampling.masks(text[start:], (), position=len(text))


def _forward_row(job: ProposalJob, share: int) -> ForwardRow:
    draws = share == job.num_left and job.draft_length > 0
    return ForwardRow(job.kv, job.next_tokens(share), int(draws))


def _take(job: ProposalJob, draws: Draws) -> Proposal | OutriderError | None:
    """The answer, if a pass brought it: a row that cannot be drawn from ends the proposal, and the session when
    nothing was drawn before it.
    """
    if draws.token_ids:
        job.accept(draws)
    if draws.error is not None:
        return _answer(job) if job.num_drawn else draws.error
    return _answer(job) if job.num_drawn == job.draft_length else None


def _answer_when_done(job: ProposalJob) -> Proposal | None:
    """The answer to an ``Extend`` that wanted no tokens, once it is up to date."""
    return None if job.num_left else _answer(job)


def _answer(job: ProposalJob) -> Proposal:
    found = joined(job.draws)
    return Proposal(job.extend.session, job.extend.generation, job.base, found.token_ids, found.evidence)
