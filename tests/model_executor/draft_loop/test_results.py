"""Reading what a draft loop wrote: which tokens count, what is told of them, and that it lasts."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.errors import IntegrityError, InvalidRequestError, NonFiniteLogitsError
from outrider.kernels.draft_sampling.layout import NUM_FIELDS, Field
from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.draft_loop import DraftMetadata, DraftRow
from outrider.model_executor.draft_loop.results import Draws, read_draws
from outrider.types import SamplingParams, SparseEvidence
from tests.support.core_driver import open_session

VOCAB_SIZE, STEPS, LIMIT = 50, 4, 6


def row(num_drafts: int, **sampling: Any) -> DraftRow:
    opened = open_session(
        0, prompt_length=1, max_length=20, num_token_ids=VOCAB_SIZE, sampling=SamplingParams(**sampling)
    )
    sequence = KVCacheManager(PagePool(2, 16)).open(20)
    return DraftRow(DraftMetadata.of(opened, VOCAB_SIZE), sequence, [1], num_drafts, 1)


def written(num_rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Records and supports of a launch: token 10 k + r in step k of row r, drawn from k + r + 1 ids."""
    records = np.full((STEPS, num_rows, NUM_FIELDS), 9999, dtype=np.int32)
    supports = np.full((STEPS, num_rows, 2, LIMIT), 9999, dtype=np.int32)
    for step in range(STEPS):
        for i in range(num_rows):
            width = (step + i) % LIMIT + 1
            records[step, i, : Field.IS_FINITE + 1] = (10 * step + i, width, 1)
            supports[step, i, 0, :width] = np.arange(width) + 10 * step + i
            supports[step, i, 1, :width] = np.full(width, 1 / width, dtype=np.float32).view(np.int32)
    return records, supports


def fail(record: np.ndarray[Any, Any], *, finite: bool, largest: float) -> None:
    record[: Field.RUNNER_UP] = (-1, 0, int(finite), np.float32(largest).view(np.int32))


def evidence_of(draws: Draws) -> tuple[list[int], list[int], list[float]]:
    assert isinstance(draws.evidence, SparseEvidence)
    found = draws.evidence
    assert found.counts.dtype == found.token_ids.dtype == np.dtype(np.int32)
    assert found.probs.dtype == np.dtype(np.float32)
    return found.counts.tolist(), found.token_ids.tolist(), found.probs.tolist()


def test_each_row_has_its_own_tokens_and_what_they_were_drawn_from() -> None:
    records, supports = written(4)
    rows = [row(4), row(2, temperature=0.0), row(3)]  # fewer than the launch has
    first, second, third = read_draws(rows, records, supports)
    assert (first.token_ids, second.token_ids, third.token_ids) == ((0, 10, 20, 30), (1, 11), (2, 12, 22))
    assert second.evidence is None
    assert evidence_of(first)[:2] == ([1, 2, 3, 4], [0, 10, 11, 20, 21, 22, 30, 31, 32, 33])
    counts, ids, probs = evidence_of(third)
    assert (counts, ids) == ([3, 4, 5], [2, 3, 4, 12, 13, 14, 15, 22, 23, 24, 25, 26])
    np.testing.assert_allclose(probs, [1 / 3] * 3 + [1 / 4] * 4 + [1 / 5] * 5, rtol=1e-6)
    assert [draws.error for draws in (first, second, third)] == [None] * 3


def test_what_was_read_outlives_the_memory_it_was_read_from() -> None:
    records, supports = written(2)
    (draws, _) = read_draws([row(2), row(2)], records, supports)
    before = evidence_of(draws)
    records.fill(-7)
    supports.fill(-7)
    assert evidence_of(draws) == before


def test_a_row_ends_before_the_first_that_failed() -> None:
    records, supports = written(5)
    fail(records[2, 0], finite=False, largest=1.0)
    fail(records[0, 1], finite=True, largest=-np.inf)
    fail(records[3, 2], finite=True, largest=1.0)  # past what was asked for
    fail(records[1, 3], finite=True, largest=2.0)
    midway, at_once, late, unsound, sound = read_draws([row(4), row(4), row(3), row(4), row(4)], records, supports)
    assert (midway.token_ids, evidence_of(midway)[0]) == ((0, 10), [1, 2])
    assert isinstance(midway.error, NonFiniteLogitsError)
    assert (at_once.token_ids, at_once.evidence) == ((), None)
    assert isinstance(at_once.error, InvalidRequestError)
    assert (late.token_ids, late.error) == ((2, 12, 22), None)
    assert isinstance(unsound.error, IntegrityError)
    assert (sound.token_ids, sound.error) == ((4, 14, 24, 34), None)
    assert evidence_of(sound)[0] == [5, 6, 1, 2]


def test_where_nothing_could_be_drawn_there_is_no_evidence() -> None:
    records, supports = written(1)
    fail(records[0, 0], finite=False, largest=np.nan)
    (draws,) = read_draws([row(4)], records, supports)
    assert (draws.token_ids, draws.evidence, type(draws.error)) == ((), None, NonFiniteLogitsError)


def test_without_supports_there_is_no_evidence() -> None:
    records, _ = written(1)
    assert read_draws([row(3, temperature=0.0)], records, None) == [Draws((0, 10, 20))]
