"""Row layout of a batch for the scoring kernels.

The parameters that do not change between steps are in each session's ``SamplingMetadata``.

Shape letters: ``R`` rows, the K+1 positions of every chosen session one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.kernels.scoring import NO_IDS, Rows, Words, place
from outrider.sampling.metadata import SamplingMetadata
from outrider.sampling.rows import ScoreRequest
from outrider.types import JudgingRule, Support


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of a batch, and the sessions that they belong to."""

    rows: Rows
    spans: list[tuple[int, int, int, int]]
    """Spans by session: number, start and stop of its rows, index of its first support id."""
    bound: float
    """Smallest ``SamplingMetadata.bound`` of the sessions."""


def lay_out(
    requests: Sequence[ScoreRequest],
    starts: Sequence[int],
    chosen: Sequence[int],
    vocab_size: int,
    *,
    indices: Sequence[int] | None = None,
) -> Layout:
    """Layout of the chosen requests. ``starts``: row of each request's first logits; ``indices``: span numbers."""
    parts: list[bytes] = []
    spans: list[tuple[int, int, int, int]] = []
    supports: list[Words] = []
    num_rows, num_ids, bound = 0, 0, float("inf")
    for number, i in zip(chosen if indices is None else indices, chosen, strict=True):
        request, index, metadata = requests[i], starts[i], requests[i].session.metadata
        base, num_drafts, bound = request.base, len(request.draft_token_ids), min(bound, metadata.bound)
        limit = min(metadata.limit or vocab_size, vocab_size)
        spans.append((number, num_rows, num_rows + num_drafts + 1, num_ids))
        num_rows += num_drafts + 1
        if (support := _support(request, metadata)) is None:
            for k in range(num_drafts):
                parts += place(index + k, base + k, base, num_ids, num_ids, limit), metadata.last
        else:
            supports.append(support.token_ids)
            for k, count in enumerate(support.counts.tolist()):
                parts += place(index + k, base + k, base, num_ids, num_ids + count, limit), metadata.draft
                num_ids += count
        parts += place(index + num_drafts, base + num_drafts, base, num_ids, num_ids, limit), metadata.last
    ids = np.concatenate(supports, dtype=np.int32, casting="unsafe") if supports else NO_IDS
    return Layout(Rows.of(parts, ids), spans, bound)


def _support(request: ScoreRequest, metadata: SamplingMetadata) -> Support | None:
    """Ids of which its rows need the probabilities, if any."""
    if metadata.rule is JudgingRule.REJECTION and request.support is not None and len(request.support.token_ids):
        return request.support
    if metadata.rule is JudgingRule.TYPICAL and request.draft_token_ids:
        ids = np.array(request.draft_token_ids, dtype=np.int32)
        return Support(np.ones_like(ids), ids)
    return None
