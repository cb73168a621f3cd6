"""Block verification of rejection: all draft tokens are judged together, and as many as can be are kept.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025 (arXiv 2403.10444), algorithm 2.
Exact for any draft distribution, as judging token by token is, and never keeps fewer tokens in expectation.

With the ratios r of target to draft at the draft tokens, rho_0 = 1 and rho_i = min(1, rho_{i-1} r_i). The residual
after i tokens is (rho_i target - draft)+, of mass s_i. The longest block whose coin falls below s_i / (s_i + 1 -
rho_i), for the whole proposal below rho_K, is kept; the next token is drawn from its residual, or from the target after
all K.

Coins and draws are those of judging token by token: coin i belongs to the position of draft token i, and the residual's
draw to that of the token that it gives. Whether a token is kept thereby depends on the coins after it too, which is why
all are keyed by the proposal's base.

Shape letters: ``K`` draft tokens, ``S`` tokens of a support, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.types import SparseEvidence, SparseScores
from outrider_coordinator.acceptance.evidence import Verdict
from outrider_coordinator.acceptance.rejection import coin, draw, indices_of_drafted
from outrider_coordinator.acceptance.vectorized import Doubles

ResidualAt = Callable[[int, float], Doubles]
"""Weights of (rho target - draft)+ at the position after a number of draft tokens, given rho."""


def judge_block(
    draft_token_ids: Sequence[int], evidence: SparseEvidence | None, scores: SparseScores, *, seed: int, base: int
) -> Verdict:
    """The verdict over a sparse support: its last weight stands for the token that the target drew outside."""
    count = len(draft_token_ids)
    if evidence is None or not count:
        return Verdict(0, int(scores.outside_token_ids[0]))
    residual_at = sparse_residuals(evidence, scores)
    ratios = sparse_ratios(draft_token_ids, evidence, scores)
    kept, weights = _longest(ratios, residual_at, seed=seed, base=base)
    if kept == count:
        return Verdict(count, int(scores.outside_token_ids[count]))
    start, width = int(evidence.counts[:kept].sum()), int(evidence.counts[kept])
    drawn = draw(seed, base, base + kept, weights)
    token_id = evidence.token_ids[start + drawn] if drawn < width else scores.outside_token_ids[kept]
    return Verdict(kept, int(token_id))


def sparse_ratios(draft_token_ids: Sequence[int], evidence: SparseEvidence, scores: SparseScores) -> list[float]:  # [K]
    """Target over draft at each draft token."""
    drafted = indices_of_drafted(draft_token_ids, evidence)
    found: list[float] = (scores.support_probs[drafted].astype(np.float64) / evidence.probs[drafted]).tolist()
    return found


def sparse_residuals(evidence: SparseEvidence, scores: SparseScores) -> ResidualAt:
    """Weights [S+1] at each draft position; the last is the mass outside, where the draft has none."""
    ends = evidence.counts.cumsum().tolist()

    def residual_at(index: int, rho: float) -> Doubles:
        row = slice(ends[index] - int(evidence.counts[index]), ends[index])
        inside = np.maximum(rho * scores.support_probs[row].astype(np.float64) - evidence.probs[row], 0.0)
        return np.append(inside, rho * float(scores.outside_mass[index]))

    return residual_at


def _longest(ratios: Sequence[float], residual_at: ResidualAt, *, seed: int, base: int) -> tuple[int, Doubles]:
    """Number of kept draft tokens, and the weights of the next token unless all are kept."""
    rhos, count = rhos_of(ratios), len(ratios)
    kept = count
    while kept and coin(seed, base, base + kept - 1) >= keeping(kept, rhos, residual_at):
        kept -= 1
    while kept < count:
        weights = residual_at(kept, rhos[kept])
        if weights.any():
            return kept, weights
        kept += 1  # The distributions are equal up to rounding, so the token stands.
    return count, np.empty(0)


def rhos_of(ratios: Sequence[float]) -> list[float]:  # [K] -> [K+1]
    """The running product of the ratios, each time cut at 1."""
    rhos = [1.0]
    for ratio in ratios:
        rhos.append(min(1.0, rhos[-1] * ratio))
    return rhos


def keeping(length: int, rhos: Sequence[float], residual_at: ResidualAt) -> float:
    """Probability that the coin of a block of this length is compared with; a longer block goes first."""
    rho = rhos[length]
    if length == len(rhos) - 1:
        return rho
    mass = float(residual_at(length, rho).sum())
    # Without a residual a block cannot end here: with rho 1 the next token has the target's own distribution.
    return mass / (mass + 1.0 - rho) if mass > 0 else 0.0
