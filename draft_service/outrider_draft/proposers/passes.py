"""Draws of several passes, joined to one proposal.

A loop gives many tokens at once, logits one at a time; most proposals take a single loop, and are that loop's draws as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.model_executor.draft_loop.results import Draws
from outrider.sampling.proposing import Drawn
from outrider.types import Evidence, SparseEvidence


def single(drawn: Drawn) -> Draws:
    """One token drawn from logits, or why there is none."""
    return Draws((), error=drawn.error) if drawn.error else Draws((drawn.token_id,), _evidence_of(drawn))


def joined(draws: Sequence[Draws]) -> Draws:
    """All tokens of one request in order, with what they were drawn from."""
    if len(draws) == 1:
        return draws[0]
    token_ids = tuple(token_id for part in draws for token_id in part.token_ids)
    return Draws(token_ids, _joined_evidence([part.evidence for part in draws]))


def _evidence_of(drawn: Drawn) -> Evidence:
    if drawn.support_ids is None or drawn.support_probs is None:
        return None
    return SparseEvidence(np.array([len(drawn.support_ids)], dtype=np.int32), drawn.support_ids, drawn.support_probs)


def _joined_evidence(parts: Sequence[Evidence]) -> Evidence:
    """Evidence of one request; None if its rule needs none."""
    sparse = [part for part in parts if isinstance(part, SparseEvidence)]
    if not sparse:
        return None
    return SparseEvidence(
        counts=np.concatenate([part.counts for part in sparse]),
        token_ids=np.concatenate([part.token_ids for part in sparse]),
        probs=np.concatenate([part.probs for part in sparse]),
    )
