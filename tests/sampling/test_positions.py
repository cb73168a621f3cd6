"""Sessions as the rows that the scoring kernels are told of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.kernels.scoring import RowFlags, ScoringColumn
from outrider.sampling import ScoreRequest
from outrider.sampling.scoring.positions import lay_out
from outrider.sampling.scoring.session_rows import SessionRows
from outrider.sampling.session import SessionSampling
from tests.sampling.building import COUPLED, TYPICAL, opening, support_of

VOCAB_SIZE = 50
CUT: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
REQUESTS = [
    ScoreRequest(SessionSampling(opening(seed=2**64 - 2, temperature=0.5)), (), 10, (3, 4), support_of([[3, 8], [4]])),
    ScoreRequest(SessionSampling(opening(COUPLED, seed=1, num_token_ids=40, **CUT)), (), 20),
    ScoreRequest(SessionSampling(opening(TYPICAL, seed=2)), (), 30, (7, 6)),
    ScoreRequest(SessionSampling(opening(temperature=0.0, num_token_ids=60, top_k=3)), (), 40, (1,)),
    ScoreRequest(SessionSampling(opening(seed=3)), (), 50, (9,), support_of([[]])),
]
STARTS = [0, 3, 4, 7, 9]
DRAWS, OUTSIDE, CUTS = RowFlags.DRAWS, RowFlags.DRAWS | RowFlags.EXCLUDES, RowFlags.CUTS


def test_each_position_is_a_row_of_its_session() -> None:
    layout = lay_out(REQUESTS, STARTS, range(5), VOCAB_SIZE)
    columns = layout.rows.words.T.tolist()
    assert columns[ScoringColumn.INDEX] == list(range(11))
    assert columns[ScoringColumn.BASE] == [10, 10, 10, 20, 30, 30, 30, 40, 40, 50, 50]
    assert columns[ScoringColumn.POSITION] == [10, 11, 12, 20, 30, 31, 32, 40, 41, 50, 51]
    assert columns[ScoringColumn.LIMIT] == [50, 50, 50, 40, *[50] * 7]
    flags = [
        OUTSIDE,
        OUTSIDE,
        DRAWS,
        RowFlags.COUPLED | CUTS,
        RowFlags.ENTROPY,
        RowFlags.ENTROPY,
        DRAWS,
        0,
        0,
        DRAWS,
        DRAWS,
    ]
    assert columns[ScoringColumn.FLAGS] == [int(flag) for flag in flags]
    assert columns[ScoringColumn.TOP_K] == [0, 0, 0, 5, 0, 0, 0, 3, 3, 0, 0]


def test_supports_lie_one_after_the_other() -> None:
    layout = lay_out(REQUESTS, STARTS, range(5), VOCAB_SIZE)
    starts, stops = layout.rows.words.T[[ScoringColumn.SUPPORT_START, ScoringColumn.SUPPORT_STOP]].tolist()
    assert stops == [2, 3, 3, 3, 4, 5, 5, 5, 5, 5, 5]
    assert starts == [0, *stops[:-1]]
    assert layout.rows.support_ids.tolist() == [3, 8, 4, 7, 6]
    assert layout.spans == [(0, 0, 3, 0), (1, 3, 4, 3), (2, 4, 7, 3), (3, 7, 9, 5), (4, 9, 11, 5)]


def test_some_sessions_are_laid_out_as_if_they_were_alone() -> None:
    layout = lay_out(REQUESTS, STARTS, [1, 3], VOCAB_SIZE)
    assert layout.rows.words[:, ScoringColumn.INDEX].tolist() == [3, 7, 8]
    assert layout.spans == [(1, 0, 1, 0), (3, 1, 3, 0)]
    assert [span[0] for span in lay_out(REQUESTS[1:2], [0], [0], VOCAB_SIZE, indices=[8]).spans] == [8]


@pytest.mark.parametrize("is_sparse", [True, False])
def test_rows_from_arrays_are_those_of_single_requests(*, is_sparse: bool) -> None:
    openings = (
        [opening(seed=4, **CUT), opening(temperature=0.6, num_token_ids=40), opening(seed=2**63)]
        if is_sparse
        else [opening(temperature=0.0), opening(COUPLED, seed=9, num_token_ids=60), opening(temperature=0.0, top_k=3)]
    )
    supports = [[[3, 8], [4]], [[1]], [[5, 6, 7], [8], [9, 2]]]
    requests = [
        ScoreRequest(
            SessionSampling(opened), (), 10 * (1 + place), range(len(own)), support_of(own) if is_sparse else None
        )
        for place, (opened, own) in enumerate(zip(openings, supports, strict=True))
    ]
    truth = lay_out(requests, [0, 3, 5], range(3), VOCAB_SIZE)
    joined = support_of([ids for own in supports for ids in own])
    rows = SessionRows.of([request.session.metadata for request in requests], VOCAB_SIZE)
    bases, lengths = np.array([10, 20, 30]), np.array([2, 1, 3])
    found = rows.with_drafts(bases, lengths, (joined.counts, joined.token_ids) if is_sparse else None)
    assert np.array_equal(found.words, truth.rows.words)
    assert np.array_equal(found.support_ids, truth.rows.support_ids)
    assert rows.bound == truth.bound
    picked = SessionRows.joined([rows.selected(np.array([place])) for place in (2, 0)])
    plain = lay_out([ScoreRequest(requests[place].session, (), 7) for place in (2, 0)], [0, 1], range(2), VOCAB_SIZE)
    assert np.array_equal(picked.at(np.array([7, 7])).words, plain.rows.words)


def test_numbers_of_64_bits_and_fractions_keep_their_bits() -> None:
    words = np.ascontiguousarray(lay_out(REQUESTS, STARTS, range(5), VOCAB_SIZE).rows.words)
    assert words[0, ScoringColumn.KEY_LOW : ScoringColumn.KEY_HIGH + 1].view(np.uint64) == 2**64 - 2
    assert words[3, ScoringColumn.TOP_P_LOW :].view(np.float64) == 0.9
    assert words[3, ScoringColumn.MIN_P : ScoringColumn.MIN_P + 1].view(np.float32) == np.float32(0.1)
    scales = words[:, ScoringColumn.SCALE].copy().view(np.float32)
    assert scales[0] == pytest.approx(2 * np.log2(np.e))
    assert scales[7] == pytest.approx(np.log2(np.e))  # greedy


def test_metadata_is_made_once_for_each_session() -> None:
    one, other = SessionSampling(opening(seed=1)), SessionSampling(opening(seed=1, temperature=0.0))
    assert one.metadata is one.metadata
    assert other.metadata.rule is not one.metadata.rule
    found = [SessionSampling(opening(seed=seed)).metadata.last for seed in (1, 2, 1)]
    assert found[0] == found[2] != found[1]
