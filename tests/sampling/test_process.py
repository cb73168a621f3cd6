"""Every sampling parameter against a plain reference, and against transformers where it means the same."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from outrider.sampling import LogitRow, ScoreRequest, process_logits
from outrider.sampling.session import SessionSampling
from outrider.types import Grammar, GrammarKind, SamplingParams
from tests.sampling.building import opening, row
from tests.structured_output.vocabularies import letters

VOCAB = 29
MASKED = -math.inf


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def masked_ids(logits: torch.Tensor) -> set[int]:
    return {i for i, value in enumerate(logits.tolist()) if value == MASKED}


def reference(logits: list[float], entry: LogitRow) -> list[float]:
    """One row, one rule after the other, in plain Python floats."""
    open_, sampling = entry.open, entry.open.sampling
    before = list(entry.tokens[: entry.length])
    prompt, output = before[: open_.prompt_length], before[open_.prompt_length :]
    values = list(logits)
    banned = set(range(open_.num_token_ids or VOCAB, VOCAB)) | set(open_.banned_token_ids)
    if sampling.allowed_token_ids:
        banned |= set(range(VOCAB)) - set(sampling.allowed_token_ids)
    if len(output) < sampling.min_tokens:
        banned |= set(open_.eos_token_ids)
    for word in sampling.bad_words:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1] and len(output) >= len(word) - 1:
            banned.add(word[-1])
    for token_id, bias in sampling.logit_bias:
        values[token_id] += bias
    counts = Counter(output)
    for token_id in set(prompt) | set(output):
        factor = sampling.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id, count in counts.items():
        values[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    values = [MASKED if i in banned else value for i, value in enumerate(values)]
    if sampling.temperature == 0:
        return values
    values = [value / sampling.temperature for value in values]
    values = reference_min_p(values, sampling)
    values = reference_top_k(values, sampling)
    return reference_top_p(values, sampling)


def probabilities(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def reference_min_p(values: list[float], sampling: SamplingParams) -> list[float]:
    probs = probabilities(values)
    return [v if p >= sampling.min_p * max(probs) else MASKED for v, p in zip(values, probs, strict=True)]


def reference_top_k(values: list[float], sampling: SamplingParams) -> list[float]:
    if sampling.top_k <= 0:
        return values
    smallest = sorted(values, reverse=True)[min(sampling.top_k, VOCAB) - 1]
    return [value if value >= smallest else MASKED for value in values]


def reference_top_p(values: list[float], sampling: SamplingParams) -> list[float]:
    if sampling.top_p == 1:
        return values
    probs = probabilities(values)
    kept, mass = set(), 0.0
    for i in sorted(range(VOCAB), key=lambda i: (-probs[i], i)):
        if mass < sampling.top_p:
            kept.add(i)
            mass += probs[i]
    return [value if i in kept else MASKED for i, value in enumerate(values)]


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.7, "logit_bias": ((3, 5.0), (4, -100.0))},
    {"top_k": 5},
    {"top_k": -1, "top_p": 0.6},
    {"top_k": 1000, "min_p": 0.05},
    {"top_p": 0.9, "top_k": 7, "min_p": 0.02, "temperature": 1.6},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.5},
    {"allowed_token_ids": (2, 3, 5, 7, 11), "banned_token_ids": (3,), "top_p": 0.8},
    {"min_tokens": 3, "eos_token_ids": (5, 6)},
    {"min_tokens": 9, "eos_token_ids": (5, 6), "top_k": 3},
    {"bad_words": ((9,), (1, 2), (8, 1, 4), (3, 8, 1, 5))},
    {"num_token_ids": 20, "top_p": 0.7},
]


@pytest.mark.parametrize("seed", range(4))
def test_every_parameter_against_the_reference_in_one_mixed_batch(seed: int) -> None:
    tokens = [3, 1, 2, 8, 1, 8, 3, 8, 1]
    rows = [
        LogitRow(SessionSampling(opening(**dict(fields))), tokens, length, 6)
        for fields in PARAMETERS
        for length in range(4, 10)
    ]
    logits = random_logits(len(rows), seed)
    kept = logits.clone()
    processed = process_logits(logits, rows)
    assert torch.equal(logits, kept), "the caller's logits are not ours to change"
    expected = torch.tensor([reference(logits[i].tolist(), entry) for i, entry in enumerate(rows)])
    assert torch.equal(processed == MASKED, expected == MASKED)
    torch.testing.assert_close(processed, expected, rtol=2e-6, atol=2e-6)


def test_rows_with_nothing_to_do_are_handed_back() -> None:
    logits = random_logits(2)
    assert process_logits(logits, [row(opening()), row(opening(temperature=0.0))]) is logits


def with_transformers(logits: torch.Tensor, processor: Any, tokens: list[int]) -> torch.Tensor:
    result: torch.Tensor = processor(torch.tensor([tokens]), logits.clone())
    return result


@pytest.mark.parametrize(
    ("fields", "processor"),
    [
        ({"temperature": 0.7}, transformers.TemperatureLogitsWarper(0.7)),
        ({"top_k": 6}, transformers.TopKLogitsWarper(6)),
        ({"top_p": 0.7}, transformers.TopPLogitsWarper(0.7)),
        ({"min_p": 0.1}, transformers.MinPLogitsWarper(0.1)),
        ({"repetition_penalty": 1.4}, transformers.RepetitionPenaltyLogitsProcessor(1.4)),
        (
            {"min_tokens": 3, "eos_token_ids": (4,)},
            transformers.MinNewTokensLengthLogitsProcessor(4, 3, 4, device="cpu"),
        ),
        (
            {"logit_bias": ((3, 2.0), (9, -7.5))},
            transformers.SequenceBiasLogitsProcessor([[[3], 2.0], [[9], -7.5]]),
        ),
        ({"bad_words": ((9,), (8, 1, 4))}, transformers.NoBadWordsLogitsProcessor([[9], [8, 1, 4]])),
        (
            {"allowed_token_ids": (1, 5)},
            transformers.SuppressTokensLogitsProcessor(sorted(set(range(VOCAB)) - {1, 5}), device="cpu"),
        ),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else next(iter(value)),
)
def test_against_transformers(fields: dict[str, Any], processor: Any) -> None:
    tokens = [3, 1, 2, 8, 8, 1]
    logits = random_logits(1, seed=5)
    processed = process_logits(logits, [row(opening(**fields), tokens)])
    torch.testing.assert_close(processed, with_transformers(logits, processor, tokens), rtol=1e-6, atol=1e-6)


def test_penalties_see_the_draft_prefix_position_by_position() -> None:
    open_ = opening(prompt_length=2, presence_penalty=1.0, frequency_penalty=0.5)
    request = ScoreRequest(SessionSampling(open_), [5, 6, 7], 3, [8, 8, 9])
    processed = process_logits(torch.zeros(4, VOCAB), request.rows())
    of_draft_token = processed[:, 8].tolist()
    assert of_draft_token == [0.0, -1.5, -2.0, -2.0]
    assert processed[:, 9].tolist() == [0.0, 0.0, 0.0, -1.5]
    assert processed[:, 7].tolist() == [-1.5] * 4
    assert processed[:, 5].tolist() == [0.0] * 4, "the prompt is no output"


def test_minimum_length_counts_draft_tokens() -> None:
    request = ScoreRequest(
        SessionSampling(opening(prompt_length=2, min_tokens=2, eos_token_ids=(4,))), [5, 6, 7], 3, [8, 8]
    )
    processed = process_logits(torch.zeros(3, VOCAB), request.rows())
    assert [masked_ids(values) for values in processed] == [{4}, set(), set()]


def test_bad_words_are_completed_by_draft_tokens_but_not_begun_in_the_prompt() -> None:
    request = ScoreRequest(SessionSampling(opening(prompt_length=3, bad_words=((7, 8),))), [5, 6, 7], 3, [7, 1])
    processed = process_logits(torch.zeros(3, VOCAB), request.rows())
    assert [masked_ids(values) for values in processed] == [set(), {8}, set()]


def test_ids_past_the_vocabulary_of_a_grammar_are_refused() -> None:
    """A model may have more ids than its tokenizer has tokens, by more than the last word of the mask."""
    asked = opening(prompt_length=4, eos_token_ids=(3,), grammar=Grammar(GrammarKind.CHOICE, '["ab", "ca"]'))
    processed = process_logits(torch.zeros(1, 100), [row(SessionSampling(asked, letters("abc")))])
    assert masked_ids(processed[0]) == set(range(100)) - {0, 2}


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [2, 4, 6, 8]] = torch.tensor([3.0, 1.0, 1.0, 1.0])
    processed = process_logits(logits, [row(opening(top_k=2))])
    assert masked_ids(processed[0]) == set(range(VOCAB)) - {2, 4, 6, 8}


def test_top_p_keeps_the_token_that_crosses_and_the_lowest_ids_of_equals() -> None:
    logits = torch.full((1, VOCAB), MASKED)
    logits[0, [20, 10, 5, 15]] = 0.0
    for top_p, expected in ((0.01, {5}), (0.25, {5}), (0.26, {5, 10}), (0.5, {5, 10}), (0.74, {5, 10, 15})):
        processed = process_logits(logits, [row(opening(top_p=top_p))])
        assert masked_ids(processed[0]) == set(range(VOCAB)) - expected, top_p


def test_top_p_of_a_flat_large_vocabulary_looks_past_its_first_tokens() -> None:
    logits = torch.zeros(2, 9000)
    logits[1, 17] = 50.0
    processed = process_logits(logits, [row(opening(top_p=0.8)), row(opening(top_p=0.8))])
    assert (processed > MASKED).sum(-1).tolist() == [7200, 1]


def test_top_k_comes_before_top_p_and_min_p_before_both() -> None:
    logits = torch.full((1, VOCAB), MASKED)
    logits[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two that top-k leaves, the first holds 4/7 of the mass: enough for 0.5, though not of the whole.
    assert masked_ids(process_logits(logits, [row(opening(top_k=2, top_p=0.5))])[0]) == set(range(1, VOCAB))
    # Min-p leaves three, whose first two hold 7/9.
    assert masked_ids(process_logits(logits, [row(opening(min_p=0.3, top_p=0.77))])[0]) == set(range(2, VOCAB))


def test_a_tiny_temperature_does_not_overflow() -> None:
    processed = process_logits(random_logits(1) * 50, [row(opening(temperature=1e-38))])
    assert bool(processed.isfinite().all())
    assert processed.softmax(-1).max().item() == 1.0


def test_ids_past_the_vocabulary_are_passed_over() -> None:
    fields: dict[str, Any] = {
        "banned_token_ids": (VOCAB, 2),
        "eos_token_ids": (VOCAB + 1,),
        "min_tokens": 5,
        "logit_bias": ((VOCAB + 3, 1.0),),
        "allowed_token_ids": (1, 2, VOCAB + 9),
        "repetition_penalty": 1.5,
    }
    processed = process_logits(random_logits(1), [row(opening(**fields), [VOCAB + 2, 1, 2, 3])])
    assert masked_ids(processed[0]) == set(range(VOCAB)) - {1}
