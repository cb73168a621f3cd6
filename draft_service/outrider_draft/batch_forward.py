"""Drafts for a step that came as arrays: sessions that draw all their tokens in one loop.

Owns how what a loop drew becomes arrays. What follows for a session that nothing
could be drawn for is decided as for single items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import AnswerBatch, SupportBatch
from outrider.errors import OutriderError
from outrider.kv_cache import KVSequence
from outrider.model_executor.draft_loop.batched import MetadataBatch
from outrider.model_executor.draft_loop.in_flight import BatchInFlight
from outrider.model_executor.draft_loop.results import DrawnBatch, Draws
from outrider.ports import Proposal
from outrider.serving.executor import ExecutorOutput
from outrider.serving.session import Session
from outrider.types import SparseEvidence

if TYPE_CHECKING:
    from outrider.serving.decode.step import DecodeBatch


@dataclass(frozen=True, slots=True)
class DraftSessions:
    """Properties of sessions for a draft loop that do not change between their steps."""

    kvs: list[KVSequence]  # [B]
    kv_offsets: list[int] | None  # [B] first tokens of the texts that these lack; None: no sequence lacks any
    metadata: MetadataBatch
    longest: list[int]  # [B] tokens, drafted ones included

    @classmethod
    def of(cls, sessions: Sequence[Session[Any]], kvs: list[KVSequence], kv_offsets: list[int]) -> DraftSessions:
        """Sessions whose tokens are drawn in loops."""
        states: list[Any] = [session.executor_state for session in sessions]
        metadata = MetadataBatch.of([state.metadata for state in states])
        # A drafted token's own KV is not computed, so that the last may stand just past the reservation.
        longest = [min(session.open.max_length, session.reserved_length + 1) for session in sessions]
        return cls(kvs, kv_offsets if any(kv_offsets) else None, metadata, longest)

    def selected(self, indices: NDArray[np.intp]) -> DraftSessions:
        """Sessions at these indices."""
        own = indices.tolist()
        return DraftSessions(
            [self.kvs[place] for place in own],
            [self.kv_offsets[place] for place in own] if self.kv_offsets else None,
            self.metadata.selected(indices),
            [self.longest[place] for place in own],
        )


class LoopForward:
    """A loop that runs, of a model or a head."""

    def __init__(self, step: DecodeBatch, drawing: BatchInFlight) -> None:
        self._step, self._drawing = step, drawing

    def is_done(self) -> bool:
        """True for what was asked for: ``finish`` waits. A begun step is done when the device is: until then its thread
        takes the message that asks for it.
        """
        return self._step.is_asked or self._drawing.is_done()

    def finish(self) -> ExecutorOutput[Proposal]:
        """Wait for the tokens; called once."""
        drawn = self._drawing.finish()
        computed = time.perf_counter_ns()
        if isinstance(drawn, DrawnBatch):
            return drawn_output(self._step, drawn, computed, self._drawing.postprocess)
        self._drawing.postprocess()
        return output_of(self._step, drawn, computed)


def drawn_output(
    step: DecodeBatch, drawn: DrawnBatch, computed_ns: int, postprocess: Callable[[], None] | None = None
) -> ExecutorOutput[Proposal]:
    """Draws for the sessions of a step; ``postprocess`` as in ``ExecutorOutput``."""
    batched, supports = step.batched, drawn.supports
    answers: AnswerBatch[Proposal] = AnswerBatch(
        batched.sessions,
        batched.generations,
        step.bases,
        np.array(drawn.counts, dtype=np.uint32),
        drawn.token_ids.view(np.uint32),
        (),
        Proposal,
        supports=None if supports is None else SupportBatch(supports.counts, supports.token_ids, supports.probs),
    )
    return ExecutorOutput((), computed_ns, batched=answers, postprocess=postprocess)


def output_of(step: DecodeBatch, drawn: Sequence[Draws], computed_ns: int) -> ExecutorOutput[Proposal]:
    """Draws for the sessions of a step, as arrays where all have tokens and evidence of one form."""
    batched = step.batched
    sparse = [draws.evidence for draws in drawn if isinstance(draws.evidence, SparseEvidence)]
    is_uniform = len(sparse) == len(drawn) or all(draws.evidence is None for draws in drawn)
    if not is_uniform or not all(draws.token_ids for draws in drawn):
        return ExecutorOutput(_one_by_one(step, drawn), computed_ns)
    counts = np.array([len(draws.token_ids) for draws in drawn], dtype=np.uint32)
    token_ids = np.array([token_id for draws in drawn for token_id in draws.token_ids], dtype=np.uint32)
    supports = _joined(sparse) if sparse else None
    answers: AnswerBatch[Proposal] = AnswerBatch(
        batched.sessions, batched.generations, step.bases, counts, token_ids, (), Proposal, supports=supports
    )
    return ExecutorOutput((), computed_ns, batched=answers)


def _one_by_one(step: DecodeBatch, drawn: Sequence[Draws]) -> list[Proposal | OutriderError | None]:
    batched = step.batched
    heads = zip(batched.sessions.tolist(), batched.generations.tolist(), step.bases.tolist(), strict=True)
    return [
        Proposal(*head, draws.token_ids, draws.evidence) if draws.token_ids else draws.error
        for head, draws in zip(heads, drawn, strict=True)
    ]


def _joined(evidence: Sequence[SparseEvidence]) -> SupportBatch:
    return SupportBatch(
        np.concatenate([one.counts for one in evidence]),
        np.concatenate([one.token_ids for one in evidence]),
        np.concatenate([one.probs for one in evidence]),
    )
