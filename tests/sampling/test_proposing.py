"""Drawn tokens, and that the reported evidence is the distribution they were drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.errors import InvalidRequestError, NonFiniteLogitsError
from outrider.ports import Open
from outrider.randomness import philox_numpy
from outrider.randomness.streams import Stream
from outrider.sampling import Drawn, LogitRow, process_logits, propose
from outrider.sampling.session import SessionSampling
from outrider.sampling.support import DraftingRules
from tests.sampling.building import COUPLED, REJECTION, TYPICAL, opening, row

VOCAB = 24
DRAWS = 100_000


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draws_along_positions(logits: torch.Tensor, open_: Open, count: int = DRAWS, **options: Any) -> list[Drawn]:
    """One distribution, drawn from at ``count`` positions."""
    session = SessionSampling(open_)
    rows = [LogitRow(session, (), length, length // 5 * 5) for length in range(count)]
    return propose(logits.expand(count, -1), rows, DraftingRules(**options))


def chi_square(token_ids: list[int], probs: np.ndarray) -> float:
    observed = np.bincount(token_ids, minlength=len(probs))
    assert observed[probs == 0].sum() == 0
    expected = probs[probs > 0].astype(np.float64)
    return float(stats.chisquare(observed[probs > 0], expected / expected.sum() * len(token_ids)).pvalue)


@pytest.mark.parametrize(
    "open_",
    [
        opening(REJECTION, seed=11),
        opening(REJECTION, seed=12, temperature=0.6, top_k=9, top_p=0.9),
        opening(TYPICAL, seed=14, min_p=0.02),
        opening(COUPLED, seed=2**63 + 5, temperature=1.3),
    ],
    ids=["rejection", "truncated", "typical", "coupled"],
)
def test_tokens_follow_the_processed_distribution(open_: Open) -> None:
    logits = random_logits(1)
    drawn = draws_along_positions(logits, open_, support_mass=1.0)
    probs = process_logits(logits, [row(open_)]).softmax(-1)[0].numpy()
    assert chi_square([one.token_id for one in drawn], probs) > 1e-3


def test_tokens_follow_the_reported_support() -> None:
    logits = random_logits(1)
    drawn = draws_along_positions(logits, opening(), support_mass=0.8)
    ids, probs = drawn[0].support_ids, drawn[0].support_probs
    assert ids is not None
    assert probs is not None
    reported = np.zeros(VOCAB)
    reported[ids] = probs
    assert 0 < len(ids) < VOCAB
    assert chi_square([one.token_id for one in drawn], reported) > 1e-3


@pytest.mark.parametrize(("mass", "limit"), [(0.999, 1024), (0.5, 1024), (0.9, 3), (1.0, 1024), (1.0, 5)])
def test_support_is_the_smallest_top_set(mass: float, limit: int) -> None:
    logits = random_logits(8, seed=3)
    rows = [row(opening(top_k=20), range(4 + i)) for i in range(8)]
    probs = process_logits(logits, rows).softmax(-1).double()
    for i, one in enumerate(propose(logits, rows, DraftingRules(mass, limit))):
        ids, reported = one.support_ids, one.support_probs
        assert ids is not None
        assert reported is not None
        assert ids.dtype == np.int32
        assert reported.dtype == np.float32
        order = torch.argsort(probs[i], descending=True, stable=True)
        assert ids.tolist() == order[: len(ids)].tolist()
        if len(ids) < limit:
            assert probs[i, ids].sum() >= min(mass, 1 - 1e-6)
        assert probs[i, ids[:-1]].sum() < mass
        expected = probs[i, ids] / probs[i, ids].sum()
        np.testing.assert_allclose(reported, expected.numpy(), rtol=1e-6)
        assert abs(reported.sum(dtype=np.float64) - 1) < 1e-6
        assert (reported > 0).all()
        assert one.token_id in ids


def test_support_of_a_wide_row_sums_to_one() -> None:
    logits = random_logits(1, vocab=5000, scale=0.5)
    (one,) = propose(logits, [row(opening())])
    assert one.support_probs is not None
    assert len(one.support_probs) == 1024
    assert abs(one.support_probs.sum(dtype=np.float64) - 1) < 1e-6


def test_equal_probabilities_enter_the_support_by_lowest_id() -> None:
    (one,) = propose(torch.zeros(1, VOCAB), [row(opening())], DraftingRules(0.3))
    assert one.support_ids is not None
    assert one.support_ids.tolist() == list(range(8))


def test_zero_probabilities_are_left_out() -> None:
    logits = torch.full((1, VOCAB), -1000.0)
    logits[0, [3, 9]] = 0.0
    (one,) = propose(logits, [row(opening())], DraftingRules(1.0))
    assert one.support_ids is not None
    assert one.support_ids.tolist() == [3, 9]


def test_the_token_is_the_race_of_the_reported_numbers() -> None:
    """Anyone who has the evidence and the seed can draw the same token."""
    for length in range(4, 60):
        entry = LogitRow(SessionSampling(opening(seed=99)), (), length, 4)
        (one,) = propose(random_logits(1, seed=length), [entry], DraftingRules(0.95))
        assert one.support_ids is not None
        assert one.support_probs is not None
        noise = philox_numpy.gumbel(99, Stream.PROPOSAL, 4, length, one.support_ids)
        assert one.token_id == one.support_ids[np.argmax(np.log(one.support_probs) + noise)]


def test_coupled_is_the_argmax_with_the_shared_noise_whatever_the_base() -> None:
    logits = random_logits(1)
    noise = philox_numpy.gumbel(5, Stream.COUPLED, 0, 30, np.arange(VOCAB))
    for base in (30, 29, 26):
        (one,) = propose(logits, [LogitRow(SessionSampling(opening(COUPLED, seed=5)), (), 30, base)])
        assert one.token_id == int(np.argmax(logits[0].numpy() + noise))
        assert one.support_ids is None


@pytest.mark.parametrize("method", [REJECTION, COUPLED, TYPICAL])
def test_greedy_is_the_argmax_under_every_rule_and_needs_no_evidence(method: Any) -> None:
    logits = random_logits(1)
    logits[0, 7] = logits[0, 19] = 50.0
    assert propose(logits, [row(opening(method, temperature=0.0, top_k=1))]) == [Drawn(7)]


@pytest.mark.parametrize("method", [REJECTION, TYPICAL])
def test_greedy_drafts_are_the_argmax_and_certain(method: Any) -> None:
    logits, session = random_logits(6, seed=5), SessionSampling(opening(method, seed=3))
    rows = [LogitRow(session, (), length, 0) for length in range(6)]
    for one, ids in zip(propose(logits, rows, DraftingRules(takes_argmax=True)), logits, strict=True):
        assert one.token_id == int(ids.argmax())
        if method is REJECTION:
            assert one.support_ids is not None
            assert one.support_probs is not None
            assert (one.support_ids.tolist(), one.support_probs.tolist()) == ([one.token_id], [1.0])


def test_greedy_drafts_leave_coupled_requests_their_noise() -> None:
    open_ = opening(COUPLED, seed=9)
    plain, greedy = (draws_along_positions(random_logits(1), open_, 50, takes_argmax=is_on) for is_on in (False, True))
    assert plain == greedy
    assert len({one.token_id for one in greedy}) > 1


def test_typical_needs_no_evidence() -> None:
    (one,) = propose(random_logits(1), [row(opening(TYPICAL))])
    assert one == Drawn(one.token_id)


def test_rows_that_cannot_be_drawn_from_harm_no_other() -> None:
    logits = random_logits(5)
    rows = [row(opening(seed=i)) for i in range(5)]
    expected = propose(logits, rows)
    rows[3] = row(opening(seed=3, allowed_token_ids=(2,), banned_token_ids=(2,)))
    logits[1, 4] = float("nan")
    logits[4, 0] = float("inf")
    drawn = propose(logits, rows)
    assert isinstance(drawn[1].error, NonFiniteLogitsError)
    assert isinstance(drawn[3].error, InvalidRequestError)
    assert isinstance(drawn[4].error, NonFiniteLogitsError)
    assert drawn[1].token_id == -1
    for i in (0, 2):
        assert drawn[i].token_id == expected[i].token_id
        np.testing.assert_array_equal(drawn[i].support_probs, expected[i].support_probs)


def test_minus_infinity_is_not_finite_either() -> None:
    logits = random_logits(1)
    logits[0, 3] = -float("inf")
    assert isinstance(propose(logits, [row(opening(temperature=0.0))])[0].error, NonFiniteLogitsError)


def test_no_rows() -> None:
    assert propose(torch.empty(0, VOCAB), []) == []
