"""Rejection sampling (Leviathan et al., Chen et al.) over a sparse support: exact for any draft distribution.

The draft drew from ``S`` ids, so its distribution is sparse and fully described. The target says its probability of
those ids, the mass outside them, and one token already drawn outside. The residual (target - draft)+ is what is left
inside plus the whole mass outside, because the draft has none there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.acceptance.draws import coins, draw
from coordinator.acceptance.verdict import NextToken, Verdict
from outrider.types import SparseEvidence, SparseScores


def judge_rejection(
    draft_token_ids: Sequence[int], evidence: SparseEvidence | None, scores: SparseScores, *, seed: int, base: int
) -> Verdict:
    """Accept x when u < target(x)/draft(x), strictly; at the first rejection draw from the residual."""
    if evidence is None or not draft_token_ids:
        return Verdict(0, int(scores.outside_token_ids[0]), NextToken.BONUS)
    drafted = _indices_of_drafted(draft_token_ids, evidence)  # [K] into the flat support
    ratios = scores.support_probs[drafted].astype(np.float64) / evidence.probs[drafted]  # [K]
    kept = coins(seed, base, len(draft_token_ids)) < ratios
    ends = np.cumsum(evidence.counts)
    for index in range(kept.shape[0]):
        if kept[index]:
            continue
        row = slice(int(ends[index] - evidence.counts[index]), int(ends[index]))
        token_id = _draw_recovered(row, index, evidence, scores, seed=seed, base=base)
        if token_id is not None:
            return Verdict(index, token_id, NextToken.RECOVERED)
        # An empty residual: the laws are equal up to rounding, so the token stands.
    return Verdict(kept.shape[0], int(scores.outside_token_ids[-1]), NextToken.BONUS)


def _indices_of_drafted(draft_token_ids: Sequence[int], evidence: SparseEvidence) -> np.ndarray:
    """Where each draft token stands in the flat support; it is there exactly once, as ``check_proposal`` made sure."""
    wanted = np.repeat(np.asarray(draft_token_ids, dtype=np.int32), evidence.counts)
    return np.flatnonzero(evidence.token_ids == wanted)


def _draw_recovered(
    row: slice, index: int, evidence: SparseEvidence, scores: SparseScores, *, seed: int, base: int
) -> int | None:
    """A token from (target - draft)+ at draft position ``index``; None when that is empty."""
    inside = np.maximum(scores.support_probs[row].astype(np.float64) - evidence.probs[row], 0.0)  # [S]
    weights = np.append(inside, np.float64(scores.outside_mass[index]))  # [S+1]
    if not weights.any():
        return None
    drawn = draw(seed, base, base + index, weights)
    # Outside means the token that the target has already drawn there.
    return int(evidence.token_ids[row][drawn] if drawn < inside.shape[0] else scores.outside_token_ids[index])
