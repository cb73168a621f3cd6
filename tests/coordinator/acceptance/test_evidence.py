"""Evidence that cannot be judged is found on arrival."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.types import Evidence, SparseEvidence
from outrider_coordinator.acceptance import is_sound_proposal


def sparse(counts: list[int], ids: list[int], probs: list[float]) -> SparseEvidence:
    return SparseEvidence(np.array(counts, np.int32), np.array(ids, np.int32), np.array(probs, np.float32))


def check(token_ids: tuple[int, ...], evidence: Evidence, *, asked: int = 4, needs: bool = False) -> bool:
    needs = needs or evidence is not None
    return is_sound_proposal(token_ids, evidence, needs_evidence=needs, asked=asked, num_token_ids=10)


GOOD = sparse([2, 3], [3, 4, 1, 9, 3], [0.25, 0.75, 0.5, 0.25, 0.25])


def test_good_evidence_passes() -> None:
    assert check((4, 9), GOOD)
    assert check((), None, needs=True)
    assert check((1, 2), None)


def test_a_thousand_float32_probabilities_pass() -> None:
    row = np.random.default_rng(0).dirichlet(np.full(1024, 0.05)).astype(np.float32) + np.float32(1e-9)
    row /= row.sum()
    evidence = SparseEvidence(np.array([1024], np.int32), np.arange(1024, dtype=np.int32), row)
    assert is_sound_proposal((5,), evidence, needs_evidence=True, asked=1, num_token_ids=1024)


BAD: dict[str, tuple[tuple[int, ...], Evidence]] = {
    "more than asked": ((1, 1, 1, 1, 1), GOOD),
    "token too large": ((10,), GOOD),
    "token negative": ((-1,), GOOD),
    "a row missing": ((4, 9, 1), GOOD),
    "a row too many": ((4,), GOOD),
    "empty row": ((4, 9), sparse([2, 0], [3, 4], [0.5, 0.5])),
    "too few ids": ((4, 9), sparse([2, 3], [3, 4, 1, 9], [0.25, 0.75, 0.5, 0.5])),
    "too few probabilities": ((4, 9), sparse([2, 1], [3, 4, 9], [0.25, 0.75])),
    "id too large": ((4,), sparse([2], [10, 4], [0.5, 0.5])),
    "id negative": ((4,), sparse([2], [-1, 4], [0.5, 0.5])),
    "id twice in a row": ((4,), sparse([3], [3, 4, 3], [0.25, 0.5, 0.25])),
    "probability 0": ((4,), sparse([2], [3, 4], [0.0, 1.0])),
    "probability negative": ((4,), sparse([3], [3, 4, 5], [-0.5, 1.0, 0.5])),
    "probability NaN": ((4,), sparse([2], [3, 4], [math.nan, 0.5])),
    "probability infinite": ((4,), sparse([2], [3, 4], [math.inf, 0.5])),
    "sum too small": ((4,), sparse([2], [3, 4], [0.5, 0.49])),
    "sum too large": ((4,), sparse([2], [3, 4], [0.5, 0.51])),
    "second sum wrong": ((4, 9), sparse([2, 2], [3, 4, 9, 1], [0.5, 0.5, 0.5, 0.6])),
    "token not in its support": ((5,), sparse([2], [3, 4], [0.5, 0.5])),
    "token in the other row": ((9, 4), GOOD),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_evidence_is_refused(name: str) -> None:
    assert not check(*BAD[name])


def test_none_at_all_is_refused() -> None:
    assert not check((1,), None, needs=True)


def test_no_more_tokens_than_asked_for_pass_without_evidence_either() -> None:
    assert check((1, 1, 1, 1), None)
    assert not check((1, 1, 1, 1, 1), None)


def test_a_rule_that_needs_no_evidence_reads_none() -> None:
    assert is_sound_proposal((1,), sparse([1], [99], [7.0]), needs_evidence=False, asked=4, num_token_ids=10)
