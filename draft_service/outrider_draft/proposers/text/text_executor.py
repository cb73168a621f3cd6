"""Executor of proposers that keep no KV cache: sessions are texts, and an item costs one token of the budget.

Owns what a proposer's answer may be: tokens that may be drawn, no more than were asked for, and evidence that fits
them. Imports no torch.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from outrider.errors import IntegrityError, OutriderError
from outrider.ports import Extend, Open, Proposal
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.session import Session
from outrider.types import Evidence, SparseEvidence
from outrider_draft.items import check_extend, check_hidden_states, proposal_length
from outrider_draft.proposers.base import DraftTokens, ProposalRequest, Proposer
from outrider_draft.texts import PlainSequence

_log = logging.getLogger(__name__)

_MAX_TOKEN_IDS = 2**31
"""Texts are kept as 32-bit integers."""


@dataclass(slots=True)
class TextJob:
    """One ``Extend`` under way."""

    extend: Extend
    text: PlainSequence
    request: ProposalRequest | None
    """None: it says how much it holds, and waits for hidden states."""
    num_left: int = 1
    """A proposal counts as one token of the budget."""
    num_last: int = 1


class TextExecutor(Executor[PlainSequence, Extend, TextJob, Proposal]):
    """Serves one proposer."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self._vocab_size = proposer.vocab_size or _MAX_TOKEN_IDS

    def check(self, session: Session[PlainSequence], item: Extend) -> Proposal | None:
        """An empty proposal for a session past the limit; ``InvalidRequestError`` for a bad item."""
        check_extend(session.open, item, vocab_size=self._vocab_size)
        if item.hidden_states is not None:
            width = self.proposer.hidden_size * len(self.proposer.hidden_state_layers)
            check_hidden_states(item, item.hidden_states, width=width)
        base = item.num_kept_tokens + len(item.token_ids)
        return Proposal(item.session, item.generation, base, ()) if base > session.reserved_length else None

    def begin(self, session: Session[PlainSequence], item: Extend) -> TextJob:
        """The text is brought up to date at once."""
        if self._lacks_states(session, item):
            held = item.token_ids[:-1] if not self.proposer.reads_all_states else ()
            session.sequence.extend(held)
            return TextJob(item, session.sequence, None)
        session.sequence.extend(item.token_ids)
        request = session.executor_state
        if not isinstance(request, ProposalRequest):
            request = session.executor_state = ProposalRequest(session.open, session.sequence.token_ids)
        if item.hidden_states is not None:
            request.hidden_states = item.hidden_states
        request.num_tokens = proposal_length(session.open, item, reserved_length=session.reserved_length)
        return TextJob(item, session.sequence, request)

    def execute(self, batch: Sequence[tuple[TextJob, int]]) -> ExecutorOutput[Proposal]:
        """Propose for every job."""
        requests = [job.request for job, _ in batch if job.request is not None]
        found = iter(self._propose(requests) if requests else ())
        results = [
            _nothing(job) if job.request is None else self._answer(job, job.request, next(found)) for job, _ in batch
        ]
        return ExecutorOutput(results=results, computed_ns=time.perf_counter_ns())

    def _lacks_states(self, session: Session[PlainSequence], item: Extend) -> bool:
        if not self.proposer.hidden_state_layers or item.hidden_states is not None:
            return False
        return bool(item.token_ids) or session.executor_state is None

    def _propose(self, requests: Sequence[ProposalRequest]) -> Sequence[DraftTokens | OutriderError]:
        """A proposer that fails costs these sessions their draft, and the others nothing."""
        name = type(self.proposer).__name__
        try:
            found: object = self.proposer.propose(requests)
        except Exception as error:
            _log.exception("%s failed; %d sessions go on without a draft", name, len(requests))
            return [IntegrityError(f"{name} failed: {type(error).__name__}: {error}")] * len(requests)
        if not isinstance(found, list | tuple):
            what = f"{name} answered with {type(found).__name__}: it should be a list with DraftTokens of each request"
            return [IntegrityError(what)] * len(requests)
        if len(found) != len(requests):
            return [IntegrityError(f"{name} answered {len(found)} of {len(requests)} requests")] * len(requests)
        return found

    def _answer(
        self, job: TextJob, request: ProposalRequest, found: DraftTokens | OutriderError
    ) -> Proposal | OutriderError:
        if isinstance(found, OutriderError):
            return found
        base = job.text.length
        try:
            token_ids, evidence = _read(found, request)
        except Exception as error:
            name = type(self.proposer).__name__
            _log.exception("an answer of %s cannot be read; its session goes on without a draft", name)
            return IntegrityError(f"{name} answered what cannot be read: {error}")
        # As of a draft with KV, all draft tokens but the last are held.
        job.text.extend(token_ids[:-1])
        return Proposal(job.extend.session, job.extend.generation, base, token_ids, evidence)


def _nothing(job: TextJob) -> Proposal:
    return Proposal(job.extend.session, job.extend.generation, job.text.length, ())


def _read(found: object, request: ProposalRequest) -> tuple[tuple[int, ...], Evidence]:
    """Draft tokens that may be drawn, and their evidence; any error where a proposer gave what it may not."""
    if not isinstance(found, DraftTokens):
        raise TypeError(f"a request's answer is {type(found).__name__}: it should be DraftTokens")
    token_ids = _drawable(found.token_ids, request.open.num_token_ids)[: request.num_tokens]
    if found.evidence is None:
        return token_ids, certain_evidence(request.open, token_ids)
    _check_arrays(found.evidence)
    return token_ids, _cut(found.evidence, token_ids)


def _check_arrays(evidence: object) -> None:
    if not isinstance(evidence, SparseEvidence):
        raise TypeError(f"evidence is {type(evidence).__name__}: it should be SparseEvidence or None")
    for field in fields(evidence):
        content = getattr(evidence, field.name)
        if not isinstance(content, np.ndarray):
            kind = type(evidence).__name__
            raise TypeError(f"{kind}.{field.name} is {type(content).__name__}: it should be a NumPy array")


def _drawable(token_ids: Sequence[int], num_token_ids: int) -> tuple[int, ...]:
    """Tokens before the first that may not be drawn."""
    ids = tuple(operator.index(token_id) for token_id in token_ids)
    known = next((i for i, token_id in enumerate(ids) if not 0 <= token_id < num_token_ids), len(ids))
    return ids[:known]


def _cut(evidence: Evidence, token_ids: Sequence[int]) -> Evidence:
    """The rows of the first tokens."""
    count = len(token_ids)
    if not count:
        return None
    if isinstance(evidence, SparseEvidence):
        end = int(evidence.counts[:count].sum())
        return SparseEvidence(evidence.counts[:count], evidence.token_ids[:end], evidence.probs[:end])
    return evidence


def certain_evidence(opened: Open, token_ids: Sequence[int]) -> Evidence:
    """Rows with all probability on one token; None where the rule needs no evidence."""
    if not token_ids or not opened.judging_rule.needs_evidence:
        return None
    ones = np.ones(len(token_ids), dtype=np.float32)
    return SparseEvidence(np.ones(len(token_ids), dtype=np.int32), np.array(token_ids, dtype=np.int32), ones)
