"""The scoring kernels against the reference: whole sessions in every form, at awkward sizes, memory poisoned first.

``conftest.py`` collects it where there is a GPU. On a CPU, ``test_scoring_triton.py`` runs it in Triton's interpreter,
in a process of its own: the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.batched import ScoreBatch
from outrider.errors import IntegrityError, InvalidRequestError, NonFiniteLogitsError, ProtocolError
from outrider.kernels.scoring import Found, launching
from outrider.kernels.token_mask import mask_tokens, reference
from outrider.ports import Open
from outrider.sampling import ScoreOutcome, ScoreRequest, score
from outrider.sampling.scoring import fused
from outrider.sampling.scoring.fused import begin_scoring
from outrider.sampling.scoring.row_scoring import RowScoring, ScoredRows
from outrider.sampling.scoring.session_rows import SessionRows
from outrider.sampling.session import SessionSampling
from outrider.types import (
    AcceptanceMethod,
    Grammar,
    GrammarKind,
    JudgingRule,
    SparseScores,
    Support,
    TokenScores,
    TypicalScores,
)
from tests.sampling.building import COUPLED, REJECTION, TYPICAL, opening, support_of
from tests.structured_output.vocabularies import letters

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.bfloat16]
VOCABS = [1, 17, 1000, 2500] if INTERPRETED else [1, 17, 1000, 2500, 128_256]
LARGE = VOCABS[-1]
# The interpreter takes its time: each size, type, search and temperature once or twice, not each with all others.
FORM_CASES = (
    [(1, torch.float32), (17, torch.bfloat16), (1000, torch.float32), (2500, torch.float32), (2500, torch.bfloat16)]
    if INTERPRETED
    else [(size, dtype) for size in VOCABS for dtype in DTYPES]
)
TEMPERATURES = [0.05, 100.0] if INTERPRETED else [0.05, 1.0, 100.0]
NARROW = launching.Search(64, 128, 8) if INTERPRETED else launching.Search(1024, 2048, 8)
WIDE = launching.Search(128, 256, 16) if INTERPRETED else launching.Search(2048, 4096, 16)
TINY = launching.Search(16, 64, 4)
SEARCHES = [(TINY, NARROW), (NARROW, WIDE)]
SEARCH_CASES = (
    list(zip(SEARCHES, DTYPES, strict=True))
    if INTERPRETED
    else [(searches, dtype) for searches in SEARCHES for dtype in DTYPES]
)
BASE = 40
TOKENS = tuple(range(BASE))


@pytest.fixture(autouse=True)
def _seed_and_poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1 if INTERPRETED else 4)
    torch.manual_seed(0)
    plain_empty = torch.empty

    def poisoned(*size: int, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = plain_empty(*size, **options)  # type: ignore[call-overload]
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(launching, "NARROW", NARROW)
    monkeypatch.setattr(launching, "WIDE", WIDE)
    with torch.inference_mode():
        yield


def logits_of(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size) * spread).to(DEVICE, dtype)


def both(logits: torch.Tensor, requests: list[ScoreRequest]) -> tuple[list[ScoreOutcome], list[ScoreOutcome]]:
    """Results of the kernels, and of the reference on the CPU."""
    return begin_scoring(logits, requests, fused=True).outcomes(), score(logits.float().cpu(), requests)


def agree(found: ScoreOutcome, expected: ScoreOutcome) -> None:
    assert type(found.error) is type(expected.error)
    assert str(found.error) == str(expected.error)
    assert type(found.form) is type(expected.form)
    if found.form is None:
        return
    for field in dataclasses.fields(found.form):
        ours, truth = getattr(found.form, field.name), getattr(expected.form, field.name)
        if isinstance(truth, np.ndarray) and truth.dtype == np.float32:
            assert ours.dtype == np.float32
            entropies = field.name == "entropies"
            # The reference adds up whole rows in float32: over 128k ids it is wrong by up to 2e-5 itself.
            np.testing.assert_allclose(ours, truth, rtol=4e-5, atol=4e-5 if entropies else 1e-30)
        elif isinstance(truth, np.ndarray):
            assert ours.dtype == truth.dtype
            np.testing.assert_array_equal(ours, truth)
        else:
            assert ours == truth


def supports_of(vocab_size: int, sizes: tuple[int, ...], seed: int) -> Support:
    generator = np.random.default_rng(seed)
    return support_of([generator.permutation(vocab_size)[: min(size, vocab_size)].tolist() for size in sizes])


def request_of(open_: Open, vocab_size: int, num_drafts: int = 2, seed: int = 0) -> ScoreRequest:
    drafts = tuple(int(i) for i in np.random.default_rng(seed).integers(0, vocab_size, num_drafts))
    if open_.judging_rule is not JudgingRule.REJECTION:
        return ScoreRequest(SessionSampling(open_), TOKENS, BASE, drafts)
    sizes = ((1, 300, 0, vocab_size) * 2)[seed % 3 :][:num_drafts]
    return ScoreRequest(SessionSampling(open_), TOKENS, BASE, drafts, supports_of(vocab_size, sizes, seed))


def mixed(vocab_size: int) -> list[ScoreRequest]:
    """Every form, temperatures, limits, and sessions that need their logits adjusted first."""
    limited = max(1, vocab_size - 5)
    opens = [
        opening(seed=1),
        opening(COUPLED, seed=2, temperature=0.7),
        opening(temperature=0.0),
        opening(TYPICAL, seed=3, temperature=1.3),
        opening(seed=2**64 - 1, temperature=0.6, num_token_ids=limited),
        opening(COUPLED, seed=5, num_token_ids=limited),
        opening(temperature=0.0, num_token_ids=limited, repetition_penalty=1.4),
        opening(COUPLED, seed=6, presence_penalty=0.5, logit_bias=((0, 3.0),)),
        opening(seed=7, frequency_penalty=0.3, temperature=0.8, banned_token_ids=(3,)),
        opening(seed=9, num_logprobs=2),
        opening(seed=10, temperature=0.7, top_k=20),
        opening(COUPLED, seed=11, temperature=0.9, top_p=0.8),
        opening(TYPICAL, seed=12, min_p=0.05, num_token_ids=limited),
        opening(seed=13, min_p=0.01, top_k=40, top_p=0.95, frequency_penalty=0.3),
    ]
    return [
        request_of(open_, limited if open_.num_token_ids else vocab_size, num_drafts=seed % 4, seed=seed)
        for seed, open_ in enumerate(opens)
        if vocab_size > 5 or not open_.banned_token_ids
    ]


@pytest.mark.parametrize(("vocab_size", "dtype"), FORM_CASES)
def test_every_form_agrees_with_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    requests = mixed(vocab_size)
    logits = logits_of(sum(request.num_positions for request in requests), vocab_size, dtype)
    for found, expected in zip(*both(logits, requests), strict=True):
        agree(found, expected)


@pytest.mark.parametrize("method", [REJECTION, COUPLED, TYPICAL])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_races_are_won_by_the_same_tokens(method: AcceptanceMethod, temperature: float) -> None:
    requests = [
        request_of(opening(method, seed=seed, temperature=temperature), LARGE, 2 if INTERPRETED else 3, seed)
        for seed in range(1 if INTERPRETED else 10)
    ]
    logits = logits_of(sum(request.num_positions for request in requests), LARGE, torch.bfloat16)
    for found, expected in zip(*both(logits, requests), strict=True):
        agree(found, expected)


CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50, "temperature": 0.6},
    {"top_k": 10**6},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 1e-6},
    {"top_p": 0.3, "temperature": 5.0},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 0.02, "temperature": 1.5},
    {"min_p": 1e-9},
    {"min_p": 0.001, "top_k": 30, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.7, "logit_bias": ((0, 3.0),)},
]


@pytest.mark.parametrize(("searches", "dtype"), SEARCH_CASES)
def test_cuts_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, searches: tuple[launching.Search, launching.Search], dtype: torch.dtype
) -> None:
    """Logits on a coarse grid tie often. Where too few runs are gathered, whoever sorts is asked."""
    for name, search in zip(("NARROW", "WIDE"), searches, strict=True):
        monkeypatch.setattr(launching, name, search)
    asked = _count_scores(monkeypatch)
    for vocab_size in (1500,) if INTERPRETED else VOCABS[2:]:
        requests = [
            request_of(opening((REJECTION, COUPLED)[seed % 2], seed=seed, **cut), vocab_size, 1, seed)
            for seed, cut in enumerate(CUTS)
        ]
        logits = (logits_of(2 * len(requests), vocab_size) * 4).round() / 4
        for found, expected in zip(*both(logits.to(dtype), requests), strict=True):
            agree(found, expected)
    if searches == (NARROW, WIDE):  # what most ask for is found without sorting
        assert not asked & ({0, 1, 4, 7, 10, 11} | (set() if INTERPRETED else {3}))


def _count_scores(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    seen: set[int] = set()

    def noted(logits: torch.Tensor, requests: list[ScoreRequest]) -> list[ScoreOutcome]:
        seen.update(request.open.seed for request in requests)
        return score(logits, requests)

    monkeypatch.setattr(fused, "score", noted)
    return seen


def test_equals_at_the_edge_of_top_p_stay_by_lowest_id() -> None:
    ids = [2000, 3, 700, 1500, 2400]
    logits = torch.full((2, 2500), -9.0)
    logits[:, ids] = torch.tensor([6.0, 1.0, 1.0, 1.0, 1.0]).log()
    request = ScoreRequest(SessionSampling(opening(top_p=0.75)), TOKENS, BASE, (3,), support_of([ids]))
    found, expected = both(logits.to(DEVICE), [request])
    agree(found[0], expected[0])
    form = found[0].form
    assert isinstance(form, SparseScores)
    assert form.support_probs.tolist() == pytest.approx([0.75, 0.125, 0.125, 0, 0])
    assert form.outside_mass[0] == 0


def test_groups_of_ids_past_the_limit_weigh_nothing() -> None:
    requests = [
        request_of(opening(method, num_token_ids=700, temperature=0.7, seed=7), 700)
        for method in (REJECTION, COUPLED, TYPICAL)
    ]
    for found, expected in zip(*both(logits_of(9, 4000), requests), strict=True):
        agree(found, expected)


@pytest.mark.parametrize("peak", [0.0, 30.0, 80.0])
def test_one_token_with_nearly_all_mass(peak: float) -> None:
    """Bounds of the coupled race are loose then, and masses outside small or nothing at all."""
    logits = logits_of(6, LARGE, spread=0.5)
    logits[:, LARGE // 2] += peak
    sparse = ScoreRequest(
        SessionSampling(opening(seed=3)), TOKENS, BASE, (5, 6), support_of([[LARGE // 2], [5, LARGE // 2, 7]])
    )
    for found, expected in zip(*both(logits, [sparse, request_of(opening(COUPLED), LARGE)]), strict=True):
        agree(found, expected)


def test_mass_outside_is_summed_and_exactly_zero_when_it_underflows() -> None:
    logits = torch.full((3, 1500), -25.0)
    logits[1] = -2000.0
    logits[:, 7] = 0.0
    request = ScoreRequest(SessionSampling(opening()), TOKENS, BASE, (7, 7), support_of([[7], [7]]))
    found, expected = both(logits.to(DEVICE), [request])
    agree(found[0], expected[0])
    form = found[0].form
    assert isinstance(form, SparseScores)
    assert form.outside_mass[0] == pytest.approx(1499 * np.exp(-25.0), rel=1e-5)
    assert form.outside_mass[1] == 0
    assert form.outside_token_ids.tolist()[1] == -1


def test_findings_are_read_after_the_wait() -> None:
    found = torch.zeros(len(Found), dtype=torch.int32)

    def await_done() -> None:
        found[Found.ARGMAX] = 7

    findings = launching.TritonLaunch(found, 1, await_done, ()).findings()
    assert findings.of(Found.ARGMAX).tolist() == [7]


def test_equals_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 2500)
    logits[0, [2400, 1030, 2047]] = 1.0
    found, expected = both(logits.to(DEVICE), [ScoreRequest(SessionSampling(opening(temperature=0.0)), TOKENS, BASE)])
    assert found[0].form == expected[0].form == TokenScores((1030,))


def test_support_that_names_an_id_twice() -> None:
    request = ScoreRequest(SessionSampling(opening()), TOKENS, BASE, (4,), support_of([[4, 9, 4, 1200]]))
    found, expected = both(logits_of(2, 1500), [request])
    agree(found[0], expected[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_fail_alone(value: float) -> None:
    logits = logits_of(6, 1500)
    logits[3, 1400] = value
    requests = [request_of(opening(method), 1500, num_drafts=1) for method in (REJECTION, COUPLED, TYPICAL)]
    found, expected = both(logits, requests)
    assert isinstance(found[1].error, NonFiniteLogitsError)
    for ours, truth in zip(found, expected, strict=True):
        agree(ours, truth)


def test_sessions_that_cannot_be_scored_fail_alone() -> None:
    requests = [
        ScoreRequest(SessionSampling(opening(allowed_token_ids=(3,), banned_token_ids=(3,))), TOKENS, BASE),
        ScoreRequest(SessionSampling(opening(temperature=1e-30)), TOKENS, BASE),
        ScoreRequest(SessionSampling(opening(temperature=1e-38)), TOKENS, BASE),
        ScoreRequest(SessionSampling(opening()), TOKENS, BASE, (2000,), support_of([[1]])),
        ScoreRequest(SessionSampling(opening()), TOKENS, BASE, (1,), support_of([[1500]])),
        request_of(opening(COUPLED), 1500),
    ]
    logits = logits_of(10, 1500)
    logits[2] *= 1e9
    found, expected = both(logits, requests)
    kinds = [type(outcome.error) for outcome in found]
    assert kinds == [InvalidRequestError, type(None), InvalidRequestError, ProtocolError, ProtocolError, type(None)]
    for ours, truth in zip(found, expected, strict=True):
        agree(ours, truth)


def test_a_batch_of_other_rows_than_positions_is_refused() -> None:
    with pytest.raises(IntegrityError, match="3 rows of logits for 2 positions"):
        begin_scoring(logits_of(3, 17), [request_of(opening(), 17, 1)], fused=True)


def as_one_batch(requests: Sequence[ScoreRequest], vocab_size: int) -> ScoredRows:
    """Requests as one step."""
    lengths = np.array([len(request.draft_token_ids) for request in requests])
    drafts = np.array([token_id for request in requests for token_id in request.draft_token_ids])
    supports = [request.support for request in requests if request.support is not None]
    counts = np.concatenate([support.counts for support in supports]) if supports else None
    ids = np.concatenate([support.token_ids for support in supports]) if supports else None
    none = np.zeros(len(requests), dtype=np.int64)
    heads = none, none, none, b"", none, none, none
    columns = ScoreBatch(*heads, lengths, drafts, None, 0, counts, ids)
    samplings = [request.session for request in requests]
    metadata = [sampling.metadata for sampling in samplings]
    rows = SessionRows.of(metadata, vocab_size) if all(each.may_be_row for each in metadata) else None
    bases = np.array([request.base for request in requests])
    return ScoredRows(samplings, [request.tokens for request in requests], bases, lengths, columns, rows)


COLUMN_CASES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 3,
    "coupled": [{"method": COUPLED, "temperature": 0.8}] * 3,
    "greedy and coupled": [{"temperature": 0.0}, {"method": COUPLED, "temperature": 0.8}, {"temperature": 0.0}],
    "sampled": [{}, {"top_p": 0.9, "top_k": 20}, {"temperature": 0.6}],
    "adjusted": [{}, {"frequency_penalty": 0.5}, {"temperature": 0.6}],
    "adjusted, greedy": [{"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 0.5}, {"temperature": 0.0}],
}


@pytest.mark.parametrize(
    ("case", "flaw"),
    [
        *((case, "none") for case in COLUMN_CASES),
        *((case, "not a number") for case in ("greedy and coupled", "adjusted")),
        *((case, "cuts not found") for case in ("sampled", "coupled")),
    ],
)
def test_columns_are_scored_as_single_requests(case: str, flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if flaw == "cuts not found":
        monkeypatch.setattr(launching, "NARROW", TINY)
    num_drafts = (2, 1, 3)
    requests = [
        request_of(opening(seed=3 + place, **fields), 600, num_drafts=count)
        for place, (count, fields) in enumerate(zip(num_drafts, COLUMN_CASES[case], strict=True))
    ]
    logits = logits_of(9, 600, spread=0.05 if flaw == "cuts not found" else 3.0)
    if flaw == "not a number":
        logits[3, 5] = math.nan
    outcomes = begin_scoring(logits, requests, fused=True).outcomes()
    scoring = RowScoring(logits, as_one_batch(requests, 600))
    tokens, sparse = scoring.tokens(), scoring.sparse()
    forms = [outcome.form for outcome in outcomes]
    if flaw == "none" and "adjusted" not in case:
        assert (tokens is None) == (case == "sampled")
        assert (sparse is None) == (case != "sampled")
    if tokens is not None:
        assert tokens.tolist() == [token for form in forms if isinstance(form, TokenScores) for token in form.token_ids]
    if sparse is not None:
        for name in ("support_probs", "outside_mass", "outside_token_ids"):
            assert np.array_equal(getattr(sparse, name), np.concatenate([getattr(form, name) for form in forms]))
    for ours, expected in zip(scoring.outcomes(), outcomes, strict=True):
        assert repr(ours) == repr(expected)
    assert any(outcome.error for outcome in outcomes) == (flaw == "not a number")
    assert flaw != "not a number" or (tokens is None and sparse is None)


LOGPROB_CASES: list[list[dict[str, Any]]] = [
    [{"temperature": 0.0, "num_logprobs": 2}] * 3,
    [{"temperature": 0.0}, {"method": COUPLED, "temperature": 0.8, "num_logprobs": 0}, {"temperature": 0.0}],
    [{"temperature": 0.0, "num_logprobs": 5}, {"temperature": 0.0}, {"temperature": 0.0, "num_logprobs": 1}],
    [{"num_logprobs": 2}, {}, {"temperature": 0.6, "num_logprobs": 1}],
]


@pytest.mark.parametrize("case", LOGPROB_CASES)
@pytest.mark.parametrize("vocab_size", [600, 640])
def test_logprobs_come_beside_the_scores(case: list[dict[str, Any]], vocab_size: int) -> None:
    requests = [
        request_of(opening(seed=3 + place, **fields), vocab_size, num_drafts=count)
        for place, (count, fields) in enumerate(zip((2, 0, 3), case, strict=True))
    ]
    logits = logits_of(8, vocab_size, torch.bfloat16)
    expected = score(logits.float().cpu(), requests)
    scoring = RowScoring(logits, as_one_batch(requests, vocab_size))
    if case == LOGPROB_CASES[-1]:  # any token of a support may be emitted
        assert not any((scoring.tokens(), scoring.sparse(), scoring.logprobs()))
        found = [outcome.logprobs for outcome in scoring.outcomes()]
    else:
        assert scoring.tokens() is not None
        columns = scoring.logprobs()
        assert columns is not None
        found = columns.rows()
        singles = begin_scoring(logits, requests, fused=True).outcomes()
        assert repr([outcome.logprobs for outcome in singles]) == repr(found)
    for own, outcome in zip(found, expected, strict=True):
        assert len(own) == len(outcome.logprobs)
        for ours, truth in zip(own, outcome.logprobs, strict=True):
            for name in ("token_ids", "ranks", "top_token_ids"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(truth, name))
            np.testing.assert_allclose(ours.logprobs, truth.logprobs, atol=1e-5)
            np.testing.assert_allclose(ours.top_logprobs, truth.top_logprobs, atol=1e-5)


def test_columns_of_other_rows_than_positions_are_refused() -> None:
    step = as_one_batch([request_of(opening(), 17, num_drafts=1)], 17)
    with pytest.raises(IntegrityError, match="3 rows of logits for 2 positions"):
        RowScoring(logits_of(3, 17), step)


def test_answers_depend_on_no_neighbour() -> None:
    vocab_size = 1200 if INTERPRETED else 2500
    requests = mixed(vocab_size)[1 :: 3 if INTERPRETED else 1]
    logits = logits_of(sum(request.num_positions for request in requests), vocab_size, torch.bfloat16)
    together, start = begin_scoring(logits, requests, fused=True).outcomes(), 0
    for request, outcome in zip(requests, together, strict=True):
        stop = start + request.num_positions
        if request.open.num_logprobs is None:
            (alone,) = begin_scoring(logits[start:stop].clone(), [request], fused=True).outcomes()
            assert _bits(alone) == _bits(outcome)
        start = stop


@pytest.mark.parametrize("value", [0.0, float("nan"), *(() if INTERPRETED else (float("inf"), float("-inf")))])
def test_logits_looked_at_by_twos_give_what_they_give_one_by_one(value: float) -> None:
    """Numbers at an odd address cannot be loaded as words of two."""
    requests = [request_of(opening(method), 1500, num_drafts=1, seed=2) for method in (REJECTION, COUPLED, TYPICAL)]
    even = logits_of(6, 1500, torch.bfloat16)
    even[1, 1400] = value
    odd = torch.zeros(even.numel() + 1, dtype=even.dtype, device=DEVICE)[1:].view_as(even).copy_(even)
    by_twos, one_by_one = (begin_scoring(logits, requests, fused=True).outcomes() for logits in (even, odd))
    assert (by_twos[0].error is None) == (value == 0.0)
    for ours, others in zip(by_twos, one_by_one, strict=True):
        agree(ours, others)


def _bits(outcome: ScoreOutcome) -> list[Any]:
    assert isinstance(outcome.form, SparseScores | TokenScores | TypicalScores)
    values = dataclasses.astuple(outcome.form)
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter; there the reference's draws are compared")
def test_outside_draws_follow_the_target() -> None:
    """Draws over several groups of ids, one of them with nothing left outside the support."""
    count, vocab_size = 20_000, 2100
    distribution = torch.full((vocab_size,), -30.0)
    distribution[[3, 4, 1022, 1023, 1024, 1030, 2048, 2099]] = torch.tensor([1.0, 0.2, 0.5, 1.5, 0.1, 2.0, 1.2, -0.5])
    support = support_of([[1024, 1030, 4]])
    requests = [ScoreRequest(SessionSampling(opening(seed=seed)), TOKENS, BASE, (4,), support) for seed in range(count)]
    outcomes = begin_scoring(distribution.to(DEVICE).expand(2 * count, -1), requests, fused=True).outcomes()
    drawn = np.array([outcome.form.outside_token_ids for outcome in outcomes if isinstance(outcome.form, SparseScores)])
    probs = distribution.double().softmax(-1).numpy()
    outside = probs.copy()
    outside[[1024, 1030, 4]] = 0
    for column, weights in ((0, outside / outside.sum()), (1, probs)):
        observed = np.bincount(drawn[:, column], minlength=vocab_size)
        assert observed[weights < 1e-9].sum() == 0
        likely = np.flatnonzero(weights * count > 5)
        counted = np.append(observed[likely], count - observed[likely].sum())
        expected = np.append(weights[likely], 1 - weights[likely].sum()) * count
        assert stats.chisquare(counted, expected * count / expected.sum()).pvalue > 1e-3


PLAIN_OPENINGS = [
    opening(temperature=0.0),
    opening(COUPLED, temperature=0.9, seed=3),
    opening(REJECTION, temperature=0.7, top_p=0.8, top_k=20, seed=5),
    opening(REJECTION, temperature=1.3, seed=6),
]


ADJUSTED_OPENINGS = [
    opening(temperature=0.0, prompt_length=BASE, grammar=Grammar(GrammarKind.REGEX, "[ab]c"), eos_token_ids=(3,)),
    opening(REJECTION, temperature=0.9, seed=8, logit_bias=((7, 9.0),)),
    opening(temperature=0.0, frequency_penalty=0.4),
    opening(COUPLED, seed=9, prompt_length=BASE, grammar=Grammar(GrammarKind.REGEX, "b+"), eos_token_ids=(3,)),
]
PENALIZED = 6


@pytest.mark.parametrize("kinds", [(4, 5, 7), (0, 4, 1, 5, 3, 7), (7,), (0, 6)])
def test_sessions_with_grammars_draw_on_the_device_beside_others(kinds: tuple[int, ...]) -> None:
    """The next forward can be queued over the drawn tokens."""
    openings = [*PLAIN_OPENINGS, *ADJUSTED_OPENINGS]
    compiler = letters("abc")
    logits = logits_of(len(kinds), 1000)
    requests = [ScoreRequest(SessionSampling(openings[kind], compiler), TOKENS, BASE) for kind in kinds]
    scoring = begin_scoring(logits, requests, fused=True)
    drawn = scoring.drawn()
    if PENALIZED in kinds:
        assert drawn is None
        return
    assert drawn is not None
    forms = [outcome.form for outcome in scoring.outcomes()]
    expected = [
        form.token_ids[0] if isinstance(form, TokenScores) else int(form.outside_token_ids[0])  # type: ignore[union-attr]
        for form in forms
    ]
    assert drawn.tolist() == expected == [scoring.drawn_token(place) for place in range(len(kinds))]
    for kind, token_id in zip(kinds, expected, strict=True):
        assert kind != 4 or token_id in (0, 1)
        assert kind != 7 or token_id == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "chosen", "vocab_size", "num_words"), [(1, (0,), 3, 1), (4, (3, 1), 5000, 150)])
def test_masks_leave_allowed_tokens_and_other_rows(
    dtype: torch.dtype, num_rows: int, chosen: tuple[int, ...], vocab_size: int, num_words: int
) -> None:
    logits = logits_of(num_rows, vocab_size, dtype)
    words = torch.randint(-(2**31), 2**31, (len(chosen), num_words), dtype=torch.int32, device=DEVICE)
    rows, expected = torch.tensor(chosen, dtype=torch.int32, device=DEVICE), logits.clone()
    reference.mask_tokens(expected, rows, words)
    for place, row in enumerate(chosen):
        bits = [int(words[place, token_id // 32]) >> token_id % 32 & 1 for token_id in range(min(vocab_size, 4000))]
        allowed = torch.tensor(bits, dtype=torch.bool, device=DEVICE)
        assert torch.equal(expected[row, : len(bits)][allowed], logits[row, : len(bits)][allowed])
        assert bool((expected[row, : len(bits)][~allowed] < -1e30).all())
    mask_tokens(logits, rows, words)
    assert torch.equal(logits, expected)
    assert num_words * 32 >= vocab_size or bool((logits[list(chosen), num_words * 32 :] < -1e30).all())


MASKED_OPENINGS = [
    opening(temperature=0.0, prompt_length=BASE, grammar=Grammar(GrammarKind.REGEX, "[ab]c"), eos_token_ids=(3,)),
    opening(REJECTION, prompt_length=BASE, seed=4, grammar=Grammar(GrammarKind.REGEX, "a?[bc]+"), eos_token_ids=(3,)),
    opening(COUPLED, seed=9, prompt_length=BASE, grammar=Grammar(GrammarKind.REGEX, "b+"), eos_token_ids=(3,)),
    opening(REJECTION, top_k=20, prompt_length=BASE, seed=6, grammar=Grammar(GrammarKind.REGEX, "[abc]+")),
    opening(REJECTION, temperature=0.7, prompt_length=BASE, seed=7),
    opening(REJECTION, prompt_length=BASE, grammar=Grammar(GrammarKind.REGEX, "("), seed=8),
]
WRONG = 5


@pytest.mark.parametrize(
    ("kinds", "num_drafts", "flaw", "dtype"),
    [
        ((0, 0), 2, "none", torch.bfloat16),
        ((2, 0), 0, "none", torch.float16),
        ((1, 4, 3), 2, "none", torch.float16),
        ((1, 4, 3), 0, "none", torch.bfloat16),
        ((1, WRONG, 4), 1, "none", torch.bfloat16),
        ((2, 0), 0, "not a number", torch.bfloat16),
        ((1, 4, 3), 2, "not a number", torch.float16),
    ],
)
def test_rows_with_grammars_are_scored_as_single_sessions(
    kinds: tuple[int, ...], num_drafts: int, flaw: str, dtype: torch.dtype
) -> None:
    compiler, vocab_size = letters("abc"), 600
    requests = []
    for kind in kinds:
        open_, drafts = MASKED_OPENINGS[kind], (0, 1)[:num_drafts]
        has_support = drafts and open_.judging_rule is JudgingRule.REJECTION
        support = supports_of(vocab_size, (1, 300)[:num_drafts], 3) if has_support else None
        requests.append(ScoreRequest(SessionSampling(open_, compiler), TOKENS, BASE, drafts, support))
    logits = logits_of(sum(request.num_positions for request in requests), vocab_size, dtype)
    if flaw == "not a number":
        logits[0, 5] = math.nan
    outcomes, truths = both(logits.clone(), requests)
    for found, truth in zip(outcomes, truths, strict=True):
        agree(found, truth)
    scoring = RowScoring(logits.clone(), as_one_batch(requests, vocab_size))
    tokens, sparse = scoring.tokens(), scoring.sparse()
    assert ((tokens is None) and (sparse is None)) == (flaw != "none" or WRONG in kinds)
    for ours, expected, kind in zip(scoring.outcomes(), outcomes, kinds, strict=True):
        if kind == WRONG:
            assert isinstance(ours.error, InvalidRequestError)
        else:
            assert repr(ours) == repr(expected)
    if tokens is not None:
        rows = [outcome.form.token_ids for outcome in outcomes if isinstance(outcome.form, TokenScores)]
        assert tokens.tolist() == [token_id for row in rows for token_id in row]
    if sparse is not None:
        forms = [outcome.form for outcome in outcomes]
        for name in ("support_probs", "outside_mass", "outside_token_ids"):
            assert np.array_equal(getattr(sparse, name), np.concatenate([getattr(form, name) for form in forms]))
        masses = np.split(sparse.outside_mass, len(kinds))
        assert all(mass[0] > 0 for mass in masses)


@pytest.mark.parametrize(
    ("kinds", "flaw"),
    [
        *((kinds, "none") for kinds in ((0, 0, 0), (2, 3, 2), (0, 1, 2, 3, 0))),
        *(((0, 1, 2, 3, 0), flaw) for flaw in ("not a number", "cuts not found")),
    ],
)
def test_plain_rows_are_scored_as_single_sessions(
    kinds: tuple[int, ...], flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flaw == "cuts not found":
        monkeypatch.setattr(launching, "NARROW", TINY)
    logits = logits_of(len(kinds), 1000, spread=0.05 if flaw == "cuts not found" else 3.0)
    if flaw == "not a number":
        logits[1, 7] = math.nan
    samplings = [SessionSampling(PLAIN_OPENINGS[kind]) for kind in kinds]
    bases = np.array([BASE + index for index in range(len(kinds))])
    texts = [list(range(base)) for base in bases.tolist()]
    rows = SessionRows.of([sampling.metadata for sampling in samplings], 1000)
    picked = SessionRows.joined([rows.selected(np.array([index])) for index in range(len(kinds))])
    heads = zip(samplings, texts, bases.tolist(), strict=True)
    outcomes = begin_scoring(logits, [ScoreRequest(*head) for head in heads], fused=True).outcomes()
    scoring = RowScoring(logits, ScoredRows(samplings, texts, bases, np.zeros_like(bases), None, picked))
    drawn = scoring.drawn()
    found = scoring.next_tokens()
    assert drawn is not None
    assert drawn.tolist() == found.drawn.tolist()
    for place, outcome in enumerate(outcomes):
        assert str(found.errors.get(place, "")) == str(outcome.error or "")
        if isinstance(outcome.form, TokenScores):
            assert found.token_ids[place] == outcome.form.token_ids[0]
        elif isinstance(outcome.form, SparseScores):
            assert found.token_ids[place] == outcome.form.outside_token_ids[0]
            assert found.masses[place] == outcome.form.outside_mass[0]
    if flaw == "none":
        assert drawn.tolist() == found.token_ids.tolist()
