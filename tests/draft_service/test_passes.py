"""Proposals that took several passes: their parts in order, and the evidence of all of them."""

from __future__ import annotations

import numpy as np

from outrider.errors import NonFiniteLogitsError
from outrider.model_executor.draft_loop.results import Draws
from outrider.sampling.proposing import Drawn
from outrider.types import SparseEvidence
from outrider_draft.proposers.passes import joined, single


def sparse(token_id: int, *ids: int) -> Drawn:
    probs = np.full(len(ids), 1 / len(ids), dtype=np.float32)
    return Drawn(token_id, np.array(ids, dtype=np.int32), probs)


def test_sparse_evidence_is_put_together_token_by_token() -> None:
    found = joined([single(sparse(4, 4, 7)), single(sparse(5, 5)), single(sparse(6, 1, 6, 8))])
    assert found.token_ids == (4, 5, 6)
    assert isinstance(found.evidence, SparseEvidence)
    assert found.evidence.counts.dtype == np.int32
    assert found.evidence.counts.tolist() == [2, 1, 3]
    assert found.evidence.token_ids.tolist() == [4, 7, 5, 1, 6, 8]
    np.testing.assert_allclose(found.evidence.probs, [1 / 2, 1 / 2, 1, 1 / 3, 1 / 3, 1 / 3])


def test_a_part_that_failed_adds_nothing() -> None:
    error = NonFiniteLogitsError("no number")
    failed = single(Drawn(-1, error=error))
    assert failed == Draws((), error=error)
    found = joined([single(sparse(4, 4)), failed])
    assert found.token_ids == (4,)
    assert isinstance(found.evidence, SparseEvidence)
    assert found.evidence.counts.tolist() == [1]


def test_no_draws_are_no_tokens() -> None:
    assert joined([]) == Draws(())
