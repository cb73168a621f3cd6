"""Rejection and typical acceptance over whole rows: the reference for tests of the sparse forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.types import DenseEvidence, DenseScores, FloatArray, TypicalScores
from outrider_coordinator.acceptance.draws import coin, draw
from outrider_coordinator.acceptance.typical import judge_typical
from outrider_coordinator.acceptance.verdict import Verdict

ENTROPY_EPSILON = 1e-5
"""Keeps the logarithm finite; the kernels add the same, so both ways give one entropy."""


def judge_dense_rejection(
    draft_token_ids: Sequence[int], evidence: DenseEvidence | None, scores: DenseScores, *, seed: int, base: int
) -> Verdict:
    """Rejection sampling over whole rows; the residual is drawn over the whole row."""
    target = scores.target_probs.astype(np.float64)  # [K+1, V]
    if evidence is None or not draft_token_ids:
        return Verdict(0, draw(seed, base, base, target[0]))
    draft = fit_columns(evidence.probs, target.shape[1]).astype(np.float64)  # [K, V]
    for index, token_id in enumerate(draft_token_ids):
        if coin(seed, base, base + index) < target[index, token_id] / draft[index, token_id]:
            continue
        residual = np.maximum(target[index] - draft[index], 0.0)
        if residual.any():
            return Verdict(index, draw(seed, base, base + index, residual))
    count = len(draft_token_ids)
    return Verdict(count, draw(seed, base, base + count, target[count]))


def judge_dense_typical(
    draft_token_ids: Sequence[int], scores: DenseScores, *, seed: int, base: int, threshold: float, alpha: float
) -> Verdict:
    """Typical acceptance with probabilities, entropies and argmax taken from whole rows."""
    count = len(draft_token_ids)
    target = scores.target_probs.astype(np.float64)  # [K+1, V]
    judged = target[:count]
    reduced = TypicalScores(
        draft_token_probs=judged[np.arange(count), np.asarray(draft_token_ids, dtype=np.int64)].astype(np.float32),
        entropies=-(judged * np.log(judged + ENTROPY_EPSILON)).sum(axis=1).astype(np.float32),
        argmax_token_ids=judged.argmax(axis=1).astype(np.int32),
        bonus_token_id=draw(seed, base, base + count, target[count]),
    )
    return judge_typical(reduced, threshold=threshold, alpha=alpha)


def fit_columns(probs: FloatArray, width: int) -> FloatArray:
    """Rows truncated, or padded with zeros, to ``width`` columns: two models may pad one vocabulary differently."""
    if probs.shape[1] >= width:
        return probs[:, :width]
    return np.pad(probs, ((0, 0), (0, width - probs.shape[1])))
