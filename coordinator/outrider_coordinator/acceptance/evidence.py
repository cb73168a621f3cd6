"""Checks of received proposals with their evidence, and of scores; the verdict that judging them gives.

Bad evidence discards the proposal (K = 0 for the step, and a counter). Bad scores are a protocol error of the target.
Neither can produce a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.errors import ProtocolError
from outrider.types import (
    Evidence,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider.values import step_value
from outrider_coordinator.acceptance.vectorized import (
    TARGET_SUM_TOLERANCE,
    SupportRows,
    are_near_1,
    are_sound,
)


@step_value(frozen=True, slots=True)
class Verdict:
    """Number of accepted draft tokens, and the token after them."""

    num_accepted: int
    next_token_id: int


def is_sound_proposal(
    token_ids: Sequence[int], evidence: Evidence, *, needs_evidence: bool, asked: int, num_token_ids: int
) -> bool:
    """True if the proposal can be judged.

    ``asked`` is the draft length. Evidence is checked only where the rule needs it.
    """
    if len(token_ids) > asked or not all(0 <= token_id < num_token_ids for token_id in token_ids):
        return False
    if not (needs_evidence and token_ids):
        return True
    return evidence is not None and _is_sound_evidence(token_ids, evidence, num_token_ids)


def _is_sound_evidence(token_ids: Sequence[int], evidence: SparseEvidence, num_token_ids: int) -> bool:
    num_ids = int(evidence.counts.sum())
    if evidence.counts.shape != (len(token_ids),) or not evidence.token_ids.shape == evidence.probs.shape == (num_ids,):
        return False
    return are_sound(SupportRows.of_one(token_ids, evidence), np.array([num_token_ids]))


def check_scores(
    draft_token_ids: Sequence[int], evidence: Evidence, scores: ScoreForm, *, expects: type, num_token_ids: int
) -> None:
    """Raise ``ProtocolError`` unless the scores are the answer to this proposal and can be judged."""
    if not isinstance(scores, expects):
        raise ProtocolError(f"scores are {type(scores).__name__}, not {expects.__name__}")
    count = len(draft_token_ids)
    if isinstance(scores, TokenScores):
        sound = (
            len(scores.token_ids) == count + 1 and min(scores.token_ids) >= 0 and max(scores.token_ids) < num_token_ids
        )
    elif isinstance(scores, SparseScores):
        sound = _is_sound_sparse(count, evidence, scores, num_token_ids)
    else:
        sound = _is_sound_typical(count, scores, num_token_ids)
    if not sound:
        raise ProtocolError(f"scores of the form {type(scores).__name__} do not fit the {count} draft tokens judged")


def _is_sound_sparse(count: int, evidence: SparseEvidence | None, scores: SparseScores, num_token_ids: int) -> bool:
    width = 0 if evidence is None else evidence.token_ids.shape[0]
    outside, ids, inside = scores.outside_mass, scores.outside_token_ids, scores.support_probs
    if inside.shape != (width,) or outside.shape != (count + 1,) or ids.shape != (count + 1,):
        return False
    if not count:  # a plain step: one number and one token, for which arrays would be slow
        mass = float(outside[0])
        return abs(mass - 1.0) <= TARGET_SUM_TOLERANCE and 0 <= int(ids[0]) < num_token_ids
    sums = outside.astype(np.float64)
    if evidence is not None and width:
        if not float(inside.min()) >= 0:
            return False
        sums[:count] += np.add.reduceat(inside, np.cumsum(evidence.counts) - evidence.counts, dtype=np.float64)
    # Where there is mass outside, a token must have been drawn there; the last one is the bonus and always needed.
    drawn = zip([*outside.tolist()[:-1], 1.0], ids.tolist(), strict=True)
    return (
        float(outside.min()) >= 0
        and are_near_1(sums, TARGET_SUM_TOLERANCE)
        and all(0 <= token_id < num_token_ids for mass, token_id in drawn if mass > 0)
    )


def _is_sound_typical(count: int, scores: TypicalScores, num_token_ids: int) -> bool:
    shapes = {scores.draft_token_probs.shape, scores.entropies.shape, scores.argmax_token_ids.shape}
    return (
        shapes == {(count,)}
        and bool((np.isfinite(scores.draft_token_probs) & (scores.draft_token_probs >= 0)).all())
        and bool(np.isfinite(scores.entropies).all())
        and all(0 <= token_id < num_token_ids for token_id in scores.argmax_token_ids.tolist())
        and 0 <= scores.bonus_token_id < num_token_ids
    )
