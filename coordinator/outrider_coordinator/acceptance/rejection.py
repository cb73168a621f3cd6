"""Rejection sampling (Leviathan et al., Chen et al.) over a sparse support: exact for any draft distribution.

The draft drew from ``S`` ids, so its distribution is sparse and fully described. The target says its probability of
those ids, the mass outside them, and one token already drawn outside. The residual (target - draft)+ is what is left
inside plus the whole mass outside, because the draft has none there.

Owns the stream and key of each draw, of block verification too. Streams are independent, keyed by (seed, stream, base,
position), and never shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.randomness import scalar
from outrider.randomness.streams import Stream
from outrider.types import SparseEvidence, SparseScores
from outrider_coordinator.acceptance.evidence import Verdict
from outrider_coordinator.acceptance.vectorized import Doubles


def coin(seed: int, base: int, position: int) -> float:
    """The acceptance coin of the draft token at ``position``, in [0, 1)."""
    return scalar.coin(seed, Stream.ACCEPTANCE, base, position)


def draw(seed: int, base: int, position: int, weights: Doubles) -> int:
    """An index drawn in proportion to ``weights`` [N], whose sum is above 0; a weight of 0 is never drawn."""
    cumulative = weights.cumsum()
    point = scalar.coin(seed, Stream.RESIDUAL, base, position) * cumulative[-1]
    # The first index whose running sum is above the point: past every weight of 0. The clamp is for a product that
    # rounds up to the whole sum.
    index = int(cumulative.searchsorted(point, side="right"))
    return index if index < weights.shape[0] else int(np.flatnonzero(weights)[-1])


def judge_rejection(
    draft_token_ids: Sequence[int], evidence: SparseEvidence | None, scores: SparseScores, *, seed: int, base: int
) -> Verdict:
    """Accept x when u < target(x)/draft(x), strictly; at the first rejection draw from the residual."""
    if evidence is None or not draft_token_ids:
        return Verdict(0, int(scores.outside_token_ids[0]))
    drafted = indices_of_drafted(draft_token_ids, evidence)  # [K] into the flat support
    ratios = scores.support_probs[drafted].astype(np.float64) / evidence.probs[drafted]  # [K]
    end = 0
    for index, (ratio, count) in enumerate(zip(ratios.tolist(), evidence.counts.tolist(), strict=True)):
        row, end = slice(end, end + count), end + count
        if coin(seed, base, base + index) < ratio:
            continue
        token_id = _draw_recovered(row, index, evidence, scores, seed=seed, base=base)
        if token_id is not None:
            return Verdict(index, token_id)
        # An empty residual: the distributions are equal up to rounding, so the token stands.
    return Verdict(len(draft_token_ids), int(scores.outside_token_ids[-1]))


def indices_of_drafted(draft_token_ids: Sequence[int], evidence: SparseEvidence) -> np.ndarray:
    """Index of each draft token in the flat support; it is there exactly once in a sound proposal."""
    wanted = np.array(draft_token_ids, dtype=np.int32).repeat(evidence.counts)
    return np.flatnonzero(evidence.token_ids == wanted)


def _draw_recovered(
    row: slice, index: int, evidence: SparseEvidence, scores: SparseScores, *, seed: int, base: int
) -> int | None:
    """A token from (target - draft)+ at draft position ``index``; None when that is empty."""
    inside = np.maximum(scores.support_probs[row].astype(np.float64) - evidence.probs[row], 0.0)  # [S]
    weights = np.concatenate((inside, scores.outside_mass[index : index + 1]))  # [S+1] float64
    if not weights.any():
        return None
    drawn = draw(seed, base, base + index, weights)
    # Outside means the token that the target has already drawn there.
    return int(evidence.token_ids[row][drawn] if drawn < inside.shape[0] else scores.outside_token_ids[index])
