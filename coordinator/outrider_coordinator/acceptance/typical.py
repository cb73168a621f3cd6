"""Typical acceptance (Medusa): accept tokens that are likely enough under the target. Not exact."""

from __future__ import annotations

import numpy as np

from outrider.types import TypicalScores
from outrider_coordinator.acceptance.evidence import Verdict


def judge_typical(scores: TypicalScores, *, threshold: float, alpha: float) -> Verdict:
    """Accept while target(x) > min(threshold, alpha * exp(-entropy)); then emit the target's argmax, or the bonus."""
    bounds = np.minimum(threshold, alpha * np.exp(-scores.entropies.astype(np.float64)))  # [K]
    kept = scores.draft_token_probs > bounds
    accepted = int(np.append(kept, False).argmin())
    if accepted < kept.shape[0]:
        return Verdict(accepted, int(scores.argmax_token_ids[accepted]))
    return Verdict(accepted, scores.bonus_token_id)
