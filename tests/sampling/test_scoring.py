"""Scores in every form, against whole rows; sessions that go wrong alone."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.errors import IntegrityError, InvalidRequestError, NonFiniteLogitsError, ProtocolError
from outrider.ports import Open
from outrider.randomness import philox_numpy
from outrider.randomness.streams import GROUP_SIZE, Stream
from outrider.sampling import ScoreOutcome, ScoreRequest, process_logits, score
from outrider.sampling.scoring.fused import _is_drawable
from outrider.sampling.session import SessionSampling
from outrider.sampling.softmax import softmax_rows
from outrider.types import LogprobsMode, SparseScores, Support, TokenScores, TypicalScores
from tests.sampling.building import COUPLED, REJECTION, TYPICAL, opening, support_of
from tests.support.equality import same

VOCAB = 31
BASE = 6
TOKENS = (1, 2, 3, 4, 5, 6)
DRAFTS = (9, 4, 4)
SUPPORT = [[9, 2, 30], [4], [0, 4, 7, 11]]


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def request_of(open_: Open, drafts: tuple[int, ...] = DRAFTS, support: Support | None = None) -> ScoreRequest:
    return ScoreRequest(SessionSampling(open_), TOKENS, BASE, drafts, support)


def sparse_request(**fields: Any) -> ScoreRequest:
    return request_of(opening(**fields), DRAFTS, support_of(SUPPORT))


def whole_rows(logits: torch.Tensor, request: ScoreRequest) -> np.ndarray:
    return softmax_rows(process_logits(logits, request.rows())).numpy()


def sparse_form(outcome: ScoreOutcome) -> SparseScores:
    assert outcome.error is None
    assert isinstance(outcome.form, SparseScores)
    return outcome.form


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.5, "top_k": 6}, {"presence_penalty": 2.0, "top_p": 0.7, "num_token_ids": 31}]
)
def test_sparse_scores_against_whole_rows(fields: dict[str, Any]) -> None:
    logits = random_logits(4)
    request = sparse_request(**fields)
    form = sparse_form(score(logits, [request])[0])
    rows = whole_rows(logits, request)
    np.testing.assert_array_equal(
        form.support_probs, np.concatenate([values[ids] for values, ids in zip(rows, SUPPORT, strict=False)])
    )
    for i, ids in enumerate([*SUPPORT, []]):
        outside = np.delete(rows[i].astype(np.float64), ids)
        assert form.outside_mass[i] == pytest.approx(outside.sum(), rel=1e-5)
        assert form.outside_token_ids[i] not in ids
        assert rows[i][form.outside_token_ids[i]] > 0


def test_the_outside_token_is_the_race_of_what_is_outside() -> None:
    logits = random_logits(4)
    form = sparse_form(score(logits, [sparse_request(seed=77)])[0])
    rows = whole_rows(logits, sparse_request())
    for i, ids in enumerate([*SUPPORT, []]):
        rows[i][ids] = 0
        noise = philox_numpy.gumbel(77, Stream.OUTSIDE, BASE, BASE + i, np.arange(VOCAB))
        with np.errstate(divide="ignore"):
            assert form.outside_token_ids[i] == np.argmax(np.log(rows[i]) + noise)


def test_nothing_outside() -> None:
    logits = torch.full((3, VOCAB), -2000.0)
    logits[0, [3, 4]] = 0.0
    logits[1:, 7] = 0.0
    request = request_of(opening(), (4, 7), support_of([[3, 4], list(range(VOCAB))]))
    form = sparse_form(score(logits, [request])[0])
    assert form.outside_mass.tolist() == [0.0, 0.0, 1.0]
    assert form.outside_token_ids.tolist() == [-1, -1, 7]


def test_mass_outside_is_summed_and_not_the_rest_of_one() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 1:] = -25.0
    form = sparse_form(score(logits, [request_of(opening(), (0,), support_of([[0]]))])[0])
    assert form.outside_mass[0] == pytest.approx(30 * np.exp(-25.0), rel=1e-5)


def test_outside_and_bonus_follow_the_target() -> None:
    count, logits = 20_000, random_logits(1)
    support = support_of([[0, 3, 5, 12]])
    requests = [ScoreRequest(SessionSampling(opening(seed=seed)), TOKENS, BASE, (3,), support) for seed in range(count)]
    outcomes = score(logits.expand(2 * count, -1), requests)
    drawn = np.array([sparse_form(outcome).outside_token_ids for outcome in outcomes])
    probs = logits.softmax(-1)[0].double().numpy()
    outside = probs.copy()
    outside[[0, 3, 5, 12]] = 0
    for column, expected in ((0, outside / outside.sum()), (1, probs / probs.sum())):
        observed = np.bincount(drawn[:, column], minlength=VOCAB)
        assert observed[expected == 0].sum() == 0
        assert stats.chisquare(observed[expected > 0], expected[expected > 0] * count).pvalue > 1e-3


def test_outside_draws_over_groups_of_ids_follow_the_target() -> None:
    """More ids than one group has: first a group is drawn, then a token in it."""
    count, vocab_size = 6000, 2 * GROUP_SIZE + 40
    logits = torch.full((1, vocab_size), -30.0)
    likely = [0, 4, GROUP_SIZE - 1, GROUP_SIZE, GROUP_SIZE + 7, 2 * GROUP_SIZE, vocab_size - 1]
    logits[0, likely] = torch.tensor([1.0, 0.2, 1.5, 0.1, 2.0, 1.2, 0.4])
    support = support_of([[4, GROUP_SIZE + 7]])
    requests = [ScoreRequest(SessionSampling(opening(seed=seed)), TOKENS, BASE, (4,), support) for seed in range(count)]
    drawn = np.concatenate([
        np.array([sparse_form(outcome).outside_token_ids for outcome in score(logits.expand(1000, -1), part)])
        for part in (requests[start : start + 500] for start in range(0, count, 500))
    ])  # fmt: skip
    probs = logits.softmax(-1)[0].double().numpy()[likely]
    for column, expected in ((0, np.where(np.isin(likely, [4, GROUP_SIZE + 7]), 0, probs)), (1, probs)):
        observed = np.bincount(drawn[:, column], minlength=vocab_size)[likely]
        assert observed.sum() == count
        assert stats.chisquare(observed[expected > 0], expected[expected > 0] / expected.sum() * count).pvalue > 1e-3
        assert observed[expected == 0].sum() == 0
        for stream in set(Stream) - {Stream.OUTSIDE, Stream.OUTSIDE_GROUP}:  # such as the coins that judge
            others = (4 * philox_numpy.uniform(np.arange(count), stream, BASE, BASE + column)).astype(np.int64)
            table = np.zeros((vocab_size, 4))
            np.add.at(table, (drawn[:, column], others), 1)
            assert stats.chi2_contingency(table[table.any(axis=1)]).pvalue > 1e-4, stream


def test_no_drafts_is_an_ordinary_step() -> None:
    logits = random_logits(1)
    form = sparse_form(score(logits, [request_of(opening(), ())])[0])
    assert form.support_probs.shape == (0,)
    assert form.outside_mass[0] == pytest.approx(1.0, abs=1e-6)
    for method, kind in ((TYPICAL, TypicalScores), (COUPLED, TokenScores)):
        outcome = score(logits, [request_of(opening(method), ())])[0]
        assert isinstance(outcome.form, kind)


@pytest.mark.parametrize("method", [REJECTION, COUPLED, TYPICAL])
def test_greedy_is_the_argmax_under_every_rule(method: Any) -> None:
    logits = random_logits(4)
    (outcome,) = score(logits, [request_of(opening(method, temperature=0.0))])
    assert outcome.form == TokenScores(tuple(logits.argmax(-1).tolist()))


def test_coupled_tokens_are_the_argmax_with_the_shared_noise() -> None:
    logits = random_logits(4)
    request = request_of(opening(COUPLED, seed=3, temperature=0.7, top_k=9))
    processed = process_logits(logits, request.rows()).numpy()
    noise = philox_numpy.gumbel(3, Stream.COUPLED, 0, np.arange(BASE, BASE + 4)[:, None], np.arange(VOCAB)[None])
    assert score(logits, [request])[0].form == TokenScores(tuple(np.argmax(processed + noise, axis=-1).tolist()))


def test_coupled_tokens_do_not_depend_on_the_cut_into_steps() -> None:
    logits = random_logits(4)
    together = score(logits, [request_of(opening(COUPLED))])[0].form
    alone: list[int] = []
    for i in range(4):
        tokens = (*TOKENS, *DRAFTS[:i])
        form = score(logits[i : i + 1], [ScoreRequest(SessionSampling(opening(COUPLED)), tokens, BASE + i)])[0].form
        assert isinstance(form, TokenScores)
        alone.extend(form.token_ids)
    assert together == TokenScores(tuple(alone))


def test_typical_scores_against_whole_rows() -> None:
    logits = random_logits(4)
    request = request_of(opening(TYPICAL, temperature=0.8, min_p=0.01, seed=21))
    form = score(logits, [request])[0].form
    assert isinstance(form, TypicalScores)
    rows = whole_rows(logits, request).astype(np.float64)
    np.testing.assert_allclose(form.draft_token_probs, [rows[i, token] for i, token in enumerate(DRAFTS)], rtol=1e-6)
    np.testing.assert_allclose(form.entropies, -(rows * np.log(rows + 1e-5)).sum(-1)[:3], rtol=1e-5)
    assert form.argmax_token_ids.tolist() == rows[:3].argmax(-1).tolist()
    noise = philox_numpy.gumbel(21, Stream.OUTSIDE, BASE, BASE + 3, np.arange(VOCAB))
    with np.errstate(divide="ignore"):
        assert form.bonus_token_id == np.argmax(np.log(rows[3]) + noise)


def mixed_requests() -> list[ScoreRequest]:
    return [
        sparse_request(seed=1),
        request_of(opening(COUPLED, seed=2)),
        request_of(opening(temperature=0.0, repetition_penalty=1.4), (1, 2)),
        request_of(opening(TYPICAL, seed=3, top_p=0.9), (5,)),
        request_of(opening(TYPICAL, seed=4), (5, 6)),
        sparse_request(seed=5, temperature=0.6, top_k=12, num_logprobs=3),
        request_of(opening(seed=6), ()),
        request_of(opening(COUPLED, num_logprobs=2, seed=7), (3,)),
        request_of(opening(COUPLED, num_logprobs=0, seed=8), ()),
    ]


def logits_of(requests: list[ScoreRequest], seed: int = 1) -> torch.Tensor:
    return random_logits(sum(request.num_positions for request in requests), seed)


def parts_of(requests: list[ScoreRequest], logits: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(logits, [request.num_positions for request in requests]))


@pytest.mark.parametrize("most_rows", [1, 6, 100])
def test_logprobs_of_many_sessions_are_those_of_each(most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are computed together, and whoever stands between them."""
    monkeypatch.setattr(sys.modules["outrider.sampling.scoring.score"], "_MOST_LOGPROB_ROWS", most_rows)
    requests = [
        sparse_request(seed=1, num_logprobs=3),
        request_of(opening(COUPLED, seed=2, num_logprobs=3), ()),
        sparse_request(seed=3),
        request_of(opening(COUPLED, seed=4, num_logprobs=3), (3,)),
        request_of(opening(COUPLED, seed=5, num_logprobs=1), (3, 7)),
        request_of(opening(COUPLED, seed=6, num_logprobs=3, num_token_ids=VOCAB - 4), (3,)),
        request_of(opening(COUPLED, seed=7, num_logprobs=3), (3,)),  # fails
        request_of(opening(COUPLED, seed=8, num_logprobs=3, temperature=0.3, logprobs_mode=LogprobsMode.PROCESSED), ()),
        request_of(opening(TYPICAL, num_logprobs=3)),
        request_of(opening(COUPLED, seed=9, num_logprobs=0), (7,)),
    ]
    logits = logits_of(requests)
    parts_of(requests, logits)[6][1, 2] = torch.nan
    assert [outcome.error is not None for outcome in score(logits, requests)] == [index == 6 for index in range(10)]
    for outcome, part, request in zip(score(logits, requests), parts_of(requests, logits), requests, strict=True):
        (alone,) = score(part, [request])
        assert outcome.error is not None or same(outcome, alone)
        assert len(outcome.logprobs) == len(alone.logprobs)
        has_none = outcome.error is not None or request.open.num_logprobs is None
        assert len(outcome.logprobs) == (0 if has_none else request.num_positions)


def test_a_session_does_not_notice_its_neighbours() -> None:
    requests = mixed_requests()
    logits = logits_of(requests)
    together = score(logits, requests)
    for request, part, outcome in zip(requests, parts_of(requests, logits), together, strict=True):
        assert outcome.error is None
        assert same(score(part.clone(), [request])[0], outcome)
    reordered = score(torch.cat(parts_of(requests, logits)[::-1]), requests[::-1])
    assert all(same(a, b) for a, b in zip(together, reordered[::-1], strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bad", range(len(mixed_requests())))
def test_logits_that_are_not_finite_fail_one_session(bad: int, value: float) -> None:
    requests = mixed_requests()
    logits = logits_of(requests)
    expected = score(logits, requests)
    parts_of(requests, logits)[bad][-1, 13] = value
    for i, outcome in enumerate(score(logits, requests)):
        if i == bad:
            assert isinstance(outcome.error, NonFiniteLogitsError)
            assert outcome.form is None
        else:
            assert same(outcome, expected[i])


def broken(**changes: Any) -> ScoreRequest:
    return dataclasses.replace(sparse_request(), **changes)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (broken(support=None), "support"),
        (broken(support=support_of(SUPPORT[:2])), "support"),
        (broken(support=support_of([*SUPPORT[:2], [VOCAB]])), "support"),
        (broken(support=support_of([*SUPPORT[:2], [-1]])), "support"),
        (broken(support=Support(np.array([1, 1, 5], np.int32), np.array([1, 2], np.int32))), "support"),
        (broken(support=Support(np.array([3, -1, 1], np.int32), np.array([1, 2, 3], np.int32))), "support"),
        (broken(draft_token_ids=(1, VOCAB, 2)), "draft_token_ids"),
        (broken(draft_token_ids=(1, -1, 2)), "draft_token_ids"),
        (broken(session=SessionSampling(opening(num_token_ids=30))), "support"),
    ],
)
def test_an_item_that_breaks_the_contract_fails_alone(request_: ScoreRequest, field: str) -> None:
    requests = [*mixed_requests()[:2], request_, *mixed_requests()[2:]]
    logits = logits_of(requests)
    outcomes = score(logits, requests)
    error = outcomes.pop(2).error
    assert isinstance(error, ProtocolError)
    assert error.field == field
    parts = parts_of(requests, logits)
    expected = score(torch.cat([*parts[:2], *parts[3:]]), mixed_requests())
    assert all(same(a, b) for a, b in zip(outcomes, expected, strict=True))


def test_parameters_that_leave_nothing_fail_one_session() -> None:
    nothing = sparse_request(allowed_token_ids=(3,), banned_token_ids=(3,))
    requests = [mixed_requests()[0], nothing, mixed_requests()[1]]
    logits = logits_of(requests)
    outcomes = score(logits, requests)
    error = outcomes[1].error
    assert isinstance(error, InvalidRequestError)
    assert "no token" in str(error)
    assert same(outcomes[0], score(logits[:4], requests[:1])[0])
    assert outcomes[2].error is None


def test_rows_and_positions_must_agree() -> None:
    with pytest.raises(IntegrityError):
        score(random_logits(5), [sparse_request()])


def test_no_sessions() -> None:
    assert score(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e31])
@pytest.mark.parametrize("place", range(3))
def test_one_bad_row_is_seen_wherever_it_stands(bad: float, place: int) -> None:
    largest = [1.0, -2.0, 3.0]
    assert _is_drawable(largest, 1e30)
    largest[place] = bad
    assert not _is_drawable(largest, 1e30)
