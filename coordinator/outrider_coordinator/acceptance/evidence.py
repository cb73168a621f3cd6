"""Checks of received proposals with their evidence, and of scores.

Bad evidence discards the proposal (K = 0 for the step, and a counter). Bad scores are a protocol error of the target.
Neither can produce a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.errors import OutriderError, ProtocolError
from outrider.types import (
    DenseEvidence,
    DenseScores,
    Evidence,
    IntArray,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)

ROW_SUM_TOLERANCE = 1e-4
"""A row of probabilities summed in float64; float32 rows of a thousand ids are off by some 1e-6."""
TARGET_SUM_TOLERANCE = 1e-2
"""Support and outside mass together; wide, since a target sums 128k float32 probabilities."""


class EvidenceError(OutriderError):
    """A proposal that cannot be judged; the message has the reason."""


def check_proposal(
    token_ids: Sequence[int], evidence: Evidence, *, expects: type | None, asked: int, num_token_ids: int
) -> None:
    """Raise ``EvidenceError`` unless the proposal can be judged.

    ``expects`` is the form of evidence the rule needs, None for rules that need none; ``asked`` the draft length.
    """
    _require(len(token_ids) <= asked, "more tokens than asked for")
    _require(all(0 <= token_id < num_token_ids for token_id in token_ids), "a draft token out of range")
    if expects is None or not token_ids:
        return
    _require(isinstance(evidence, expects), f"evidence is {type(evidence).__name__}, not {expects.__name__}")
    if isinstance(evidence, SparseEvidence):
        _check_sparse(token_ids, evidence, num_token_ids)
    elif isinstance(evidence, DenseEvidence):
        _check_dense(token_ids, evidence, num_token_ids)


def _check_sparse(token_ids: Sequence[int], evidence: SparseEvidence, num_token_ids: int) -> None:
    counts, ids, probs = evidence.counts, evidence.token_ids, evidence.probs
    _require(counts.shape == (len(token_ids),), "one row for each draft token is needed")
    _require(int(counts.min()) > 0, "an empty row")
    ends = np.cumsum(counts)
    _require(ids.shape == probs.shape == (int(ends[-1]),), "ids and probabilities do not fit the counts")
    _require(int(ids.min()) >= 0 and int(ids.max()) < num_token_ids, "an id out of range")
    _require(float(probs.min()) > 0, "a probability that is not above 0")  # false for NaN; the sums find infinity
    _check_sums(np.add.reduceat(probs, ends - counts, dtype=np.float64))
    _require(_all_distinct(np.arange(len(counts)).repeat(counts), ids, num_token_ids), "an id twice in a row")
    drafted = np.array(token_ids, dtype=ids.dtype).repeat(counts)
    _require(np.count_nonzero(ids == drafted) == len(token_ids), "a draft token outside its own support")


def _all_distinct(rows: np.ndarray, ids: IntArray, num_token_ids: int) -> bool:
    keys = rows * num_token_ids + ids
    keys.sort()
    return bool((keys[1:] != keys[:-1]).all())


def _check_dense(token_ids: Sequence[int], evidence: DenseEvidence, num_token_ids: int) -> None:
    probs = evidence.probs
    _require(probs.ndim == 2 and probs.shape[0] == len(token_ids), "one row for each draft token is needed")
    _require(bool((np.isfinite(probs) & (probs >= 0)).all()), "a probability below 0")
    _require(probs.shape[1] > max(token_ids), "a draft token outside its row")
    _check_sums(probs[:, :num_token_ids].sum(axis=1, dtype=np.float64))
    drafted = probs[np.arange(len(token_ids)), np.asarray(token_ids)]
    _require(bool((drafted > 0).all()), "a draft token of probability 0")


def _check_sums(sums: np.ndarray) -> None:
    _require(_are_near_1(sums, ROW_SUM_TOLERANCE), "a row that does not sum to 1")


def _are_near_1(sums: np.ndarray, tolerance: float) -> bool:
    return all(abs(total - 1.0) <= tolerance for total in sums.tolist())  # false for NaN


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise EvidenceError(reason)


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
        support = evidence if isinstance(evidence, SparseEvidence) else None
        sound = _is_sound_sparse(count, support, scores, num_token_ids)
    elif isinstance(scores, TypicalScores):
        sound = _is_sound_typical(count, scores, num_token_ids)
    else:
        sound = _is_sound_dense(count, scores, num_token_ids)
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
        and _are_near_1(sums, TARGET_SUM_TOLERANCE)
        and all(0 <= token_id < num_token_ids for mass, token_id in drawn if mass > 0)
    )


def _is_sound_typical(count: int, scores: TypicalScores, num_token_ids: int) -> bool:
    shapes = {scores.draft_token_probs.shape, scores.entropies.shape, scores.argmax_token_ids.shape}
    return (
        shapes == {(count,)}
        and _is_non_negative(scores.draft_token_probs)
        and bool(np.isfinite(scores.entropies).all())
        and _in_range(scores.argmax_token_ids, num_token_ids)
        and 0 <= scores.bonus_token_id < num_token_ids
    )


def _is_sound_dense(count: int, scores: DenseScores, num_token_ids: int) -> bool:
    probs = scores.target_probs
    if probs.ndim != 2 or probs.shape[0] != count + 1 or probs.shape[1] < num_token_ids:
        return False
    # Nothing may lie on padded ids, or one of them could be drawn.
    sums = probs[:, :num_token_ids].sum(axis=1, dtype=np.float64)
    return _is_non_negative(probs) and _are_near_1(sums, TARGET_SUM_TOLERANCE)


def _is_non_negative(values: np.ndarray) -> bool:
    return bool((np.isfinite(values) & (values >= 0)).all())


def _in_range(token_ids: np.ndarray, num_token_ids: int) -> bool:
    return bool(((token_ids >= 0) & (token_ids < num_token_ids)).all())
