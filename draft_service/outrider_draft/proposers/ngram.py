"""Proposals by prompt lookup: no model, no torch.

Owns the search: of all n from ``max_n`` down to ``min_n``, the first whose last n tokens stand somewhere earlier in the
text, at the earliest such place; what followed there is proposed. vLLM too takes the longest match within the bounds
and, among those, the earliest (``vllm/v1/spec_decode/ngram_proposer.py``).

A looked-up token is drawn from a distribution that has it alone, and that is the evidence for rejection.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider.ports import Extend, Open, Proposal
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.session import Session
from outrider.types import DenseEvidence, Evidence, SparseEvidence
from outrider_draft.items import check_extend, proposal_length
from outrider_draft.texts import PlainSequence

_MAX_TOKEN_IDS = 2**31
"""Texts are kept as 32-bit integers."""


@dataclass(slots=True)
class LookupJob:
    """One ``Extend`` under way."""

    open: Open
    extend: Extend
    text: PlainSequence
    draft_length: int
    num_left: int = 1
    """A lookup counts as one token of the budget."""
    num_last: int = 1


class NgramProposer(Executor[PlainSequence, Extend, LookupJob, Proposal]):
    """Proposes what followed the same tokens earlier in the text."""

    def __init__(self, *, min_n: int, max_n: int) -> None:
        if min_n < 1:
            raise ConfigError("prompt_lookup_min", f"must be at least 1, not {min_n}")
        if max_n < min_n:
            raise ConfigError("prompt_lookup_max", f"must be at least prompt_lookup_min, {min_n}, not {max_n}")
        self._min_n = min_n
        self._max_n = max_n

    def check(self, session: Session[PlainSequence], item: Extend) -> Proposal | None:
        """An empty proposal for a session past the limit; ``InvalidRequestError`` for a bad item."""
        check_extend(session.open, item, vocab_size=_MAX_TOKEN_IDS)
        base = item.num_kept_tokens + len(item.token_ids)
        return Proposal(item.session, item.generation, base, ()) if base > session.reserved_length else None

    def begin(self, session: Session[PlainSequence], item: Extend) -> LookupJob:
        """The text is brought up to date at once."""
        session.sequence.extend(item.token_ids)
        length = proposal_length(session.open, item, reserved_length=session.reserved_length)
        return LookupJob(session.open, item, session.sequence, length)

    def execute(self, batch: Sequence[tuple[LookupJob, int]]) -> ExecutorOutput[Proposal]:
        """Look up for every job."""
        results = [self._propose(job) for job, _ in batch]
        return ExecutorOutput(results=results, computed_ns=time.perf_counter_ns())

    def _propose(self, job: LookupJob) -> Proposal:
        text = np.frombuffer(job.text.token_ids, dtype=np.int32)
        found = look_up(text, min_n=self._min_n, max_n=self._max_n, count=job.draft_length).tolist()
        known = next((index for index, token_id in enumerate(found) if token_id >= job.open.num_token_ids), len(found))
        token_ids = tuple(found[:known])
        return Proposal(
            job.extend.session, job.extend.generation, job.text.length, token_ids, certain_evidence(job.open, token_ids)
        )


def look_up(text: NDArray[np.int32], *, min_n: int, max_n: int, count: int) -> NDArray[np.int32]:  # [L] -> [<= count]
    """Up to ``count`` tokens that followed the earliest other occurrence of the longest repeated ending."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        start = _earliest(text, n)
        if start is not None:
            return text[start + n : start + n + count]
    return text[:0]


def _earliest(text: NDArray[np.int32], n: int) -> int | None:
    """Where the last n tokens first stand, if that is not at the end."""
    num_starts = len(text) - n
    hits = np.ones(num_starts, dtype=bool)
    for offset in range(n):
        hits &= text[offset : offset + num_starts] == text[num_starts + offset]
    found = int(hits.argmax())
    return found if hits[found] else None


def certain_evidence(opened: Open, token_ids: Sequence[int]) -> Evidence:
    """Rows with all probability on one token; None where the rule needs no evidence."""
    if not token_ids or not opened.judging_rule.needs_evidence:
        return None
    if opened.judging_rule.is_dense:
        return DenseEvidence(_one_hot(token_ids, opened.num_token_ids))
    ones = np.ones(len(token_ids), dtype=np.float32)
    return SparseEvidence(np.ones(len(token_ids), dtype=np.int32), np.array(token_ids, dtype=np.int32), ones)


def _one_hot(token_ids: Sequence[int], width: int) -> NDArray[np.float32]:  # [K] -> [K, V]
    rows = np.zeros((len(token_ids), width), dtype=np.float32)
    rows[np.arange(len(token_ids)), list(token_ids)] = 1
    return rows
