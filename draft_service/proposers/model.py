"""Proposals from a small model.

Owns bringing a session's KV up to date and drawing its draft tokens, all sessions together, whatever round each is in.
Where the device can (``ModelRunner.draft``), sessions that are up to date but for a token or two draw all their tokens
in one launch; beside them a forward takes the rest: prefill chunks, and requests whose tokens are drawn from logits,
one by one. How tokens are drawn and what is reported of it is ``outrider.engine.sampling``'s; who goes first is
``outrider.engine.scheduling``'s.

After K drafted tokens the cache holds the committed ones and K - 1 of those drafted: nobody has asked what follows the
last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draft_service.items import check_extend, proposal_length
from outrider.engine.batch import ForwardRow
from outrider.engine.drafting import MAX_CATCH_UP, MAX_STEPS, DraftingRules, DraftRow, fits_loop
from outrider.engine.ledger import Session
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.proposing import Drawn, propose
from outrider.engine.sampling.rows import LogitRow
from outrider.engine.sampling.support import DEFAULT_SUPPORT_LIMIT, DEFAULT_SUPPORT_MASS
from outrider.engine.sequences import Sequence as KvSequence
from outrider.engine.stage import Pass
from outrider.engine.waiting import mark_reached
from outrider.errors import OutriderError
from outrider.ports import Extend, Open, Proposal
from outrider.types import DenseEvidence, Evidence, SparseEvidence

DraftSession = Session[KvSequence]


@dataclass(slots=True)
class ProposalJob:
    """One ``Extend`` under way."""

    open: Open
    extend: Extend
    sequence: KvSequence
    token_ids: tuple[int, ...]
    """To be appended next: committed tokens at first, then the token drawn last."""
    draft_length: int
    """Tokens still wanted in all, after trimming."""
    loops: bool = False
    """Whether its tokens are drawn in one launch."""
    num_fed: int = 0
    drawn: list[Drawn] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens to be appended before the next token is drawn."""
        return len(self.token_ids) - self.num_fed

    @property
    def num_last(self) -> int:
        """Any prefill may be cut before its last token."""
        return 1

    @property
    def base(self) -> int:
        """Committed tokens."""
        return self.extend.base_length + len(self.extend.token_ids)

    def feed(self, count: int) -> None:
        """So many tokens were appended."""
        self.num_fed += count

    def accept(self, drawn: Sequence[Drawn]) -> None:
        """Tokens were drawn, one or more; the last is to be appended if another is wanted."""
        self.drawn += drawn
        self.token_ids, self.num_fed = (drawn[-1].token_id,), 0


class ModelProposer:
    """The draft's ``outrider.engine.core.Stage`` over one model."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        support_mass: float = DEFAULT_SUPPORT_MASS,
        support_limit: int = DEFAULT_SUPPORT_LIMIT,
    ) -> None:
        self.runner = runner
        self._support_mass = support_mass
        self._support_limit = support_limit
        self._can_loop = runner.drafting == DraftingRules(support_mass, support_limit)

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self.runner.sequences.pool.num_free

    def check(self, session: DraftSession, item: Extend) -> Proposal | None:
        """An empty proposal for a session that outgrew this model; ``InvalidRequestError`` for a bad item."""
        check_extend(session.open, item, vocab_size=self.runner.config.vocab_size)
        base = item.base_length + len(item.token_ids)
        return Proposal(item.session, item.generation, base, ()) if base > session.reserved_length else None

    def begin(self, session: DraftSession, item: Extend) -> ProposalJob:
        """The item's tokens; without any, the last one kept is computed again, for what follows it is not stored."""
        token_ids = item.token_ids
        if not token_ids:
            token_ids = (session.text.token_ids[-1],)
            self.runner.sequences.truncate(session.text, item.base_length - 1)
        length = proposal_length(session.open, item, reserved_length=session.reserved_length)
        loops = self._can_loop and length > 0 and fits_loop(session.open)
        return ProposalJob(session.open, item, session.text, token_ids, length, loops)

    @torch.inference_mode()
    def advance(self, shares: Sequence[tuple[ProposalJob, int]]) -> Pass[Proposal]:
        """One forward over so many tokens of each job, and one loop over those that can draw all their tokens."""
        looping = [job for job, _ in shares if _is_ready(job)]
        forwarded = [(job, _leave_last(job, share)) for job, share in shares if not _is_ready(job)]
        drawing = [job for job, share in forwarded if share == job.num_left and job.draft_length]
        logits = self.runner.forward([_forward_row(job, share) for job, share in forwarded]) if forwarded else None
        drafts = self.runner.draft([_draft_row(job) for job in looping]) if looping else []
        if not looping:
            # Without it the forward's time would be booked on whoever first looks at its result.
            mark_reached(self.runner.device)()
        computed = time.perf_counter_ns()
        for job, share in forwarded:
            job.feed(share)
        results = self._draw(drawing, logits)
        results |= {id(job): _take(job, drawn) for job, drawn in zip(looping, drafts, strict=True)}
        return Pass(
            results=[results[id(job)] if id(job) in results else _answer_when_done(job) for job, _ in shares],
            computed_ns=computed,
        )

    def _draw(
        self, jobs: Sequence[ProposalJob], logits: torch.Tensor | None
    ) -> dict[int, Proposal | OutriderError | None]:
        if logits is None or not jobs:
            return {}
        rows = [LogitRow(job.open, job.sequence.token_ids, job.sequence.length, job.base) for job in jobs]
        drawn = propose(logits, rows, support_mass=self._support_mass, support_limit=self._support_limit)
        return {id(job): _take(job, [token]) for job, token in zip(jobs, drawn, strict=True)}


def _is_ready(job: ProposalJob) -> bool:
    """Whether its tokens can be drawn in one launch now."""
    return job.loops and job.num_left <= MAX_CATCH_UP


def _leave_last(job: ProposalJob, share: int) -> int:
    """What a forward appends of a job's share: what ends in a loop leaves its last token to that."""
    return min(share, job.num_left - 1) if job.loops else share


def _draft_row(job: ProposalJob) -> DraftRow:
    count = min(job.draft_length - len(job.drawn), MAX_STEPS)
    return DraftRow(job.open, job.sequence, job.token_ids[job.num_fed :], count, job.base)


def _forward_row(job: ProposalJob, share: int) -> ForwardRow:
    draws = share == job.num_left and job.draft_length > 0
    return ForwardRow(job.sequence, job.token_ids[job.num_fed : job.num_fed + share], int(draws))


def _take(job: ProposalJob, drawn: Sequence[Drawn]) -> Proposal | OutriderError | None:
    """What was drawn, one or more, of which only the last can have failed: a row that cannot be drawn from ends the
    proposal, and the session when nothing was drawn before it.
    """
    error = drawn[-1].error
    if sound := drawn if error is None else drawn[:-1]:
        job.accept(sound)
    if error is not None:
        return _answer(job) if job.drawn else error
    return _answer(job) if len(job.drawn) == job.draft_length else None


def _answer_when_done(job: ProposalJob) -> Proposal | None:
    """The answer to an ``Extend`` that wanted no tokens, once it is up to date."""
    return None if job.num_left else _answer(job)


def _answer(job: ProposalJob) -> Proposal:
    token_ids = tuple(drawn.token_id for drawn in job.drawn)
    return Proposal(job.extend.session, job.extend.generation, job.base, token_ids, evidence_of(job.drawn))


def evidence_of(drawn: Sequence[Drawn]) -> Evidence:
    """The distributions that tokens were drawn from, put together; None where the rule needs none."""
    dense = [token.dense_probs for token in drawn if token.dense_probs is not None]
    if dense:
        return DenseEvidence(np.stack(dense).astype(np.float32, copy=False))
    rows = [(token.support_ids, token.support_probs) for token in drawn]
    ids = [row_ids for row_ids, _ in rows if row_ids is not None]
    probs = [row_probs for _, row_probs in rows if row_probs is not None]
    if not ids:
        return None
    return SparseEvidence(
        counts=np.array([len(row) for row in ids], dtype=np.int32),
        token_ids=np.concatenate(ids).astype(np.int32, copy=False),
        probs=np.concatenate(probs).astype(np.float32, copy=False),
    )
