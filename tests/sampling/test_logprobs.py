"""Logprobs and ranks: of what may be emitted, of the likeliest, of the prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.sampling import ScoreRequest, process_logits, prompt_logprobs, score
from outrider.sampling.session import SessionSampling
from outrider.types import CandidateLogprobs, LogprobsMode, SparseScores, TokenLogprob, TypicalScores
from tests.sampling.building import COUPLED, TYPICAL, opening, support_of

VOCAB = 40
TOKENS = (1, 2, 3, 4)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def expected(row: torch.Tensor, token_id: int) -> TokenLogprob:
    """One token's entry, worked out on its own."""
    logprobs = row.log_softmax(-1)
    rank = 1 + sum(value > logprobs[token_id].item() for value in logprobs.tolist())
    return TokenLogprob(token_id, logprobs[token_id].item(), rank)


def likeliest(row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
    return [(i, expected(row, i).logprob) for i in order[:count]]


def candidates(position: CandidateLogprobs) -> list[TokenLogprob]:
    columns = (position.token_ids.tolist(), position.logprobs.tolist(), position.ranks.tolist())
    return [TokenLogprob(*entry) for entry in zip(*columns, strict=True)]


def top(position: CandidateLogprobs) -> list[tuple[int, float]]:
    return list(zip(position.top_token_ids.tolist(), position.top_logprobs.tolist(), strict=True))


def test_rejection_gives_all_that_may_be_emitted() -> None:
    logits = random_logits(3)
    support = [[7, 1, 30, 2, 9, 11], [5]]
    request = ScoreRequest(SessionSampling(opening(num_logprobs=4)), TOKENS, 4, (7, 5), support_of(support))
    (outcome,) = score(logits, [request])
    assert isinstance(outcome.form, SparseScores)
    for i, position in enumerate(outcome.logprobs):
        ids = [*(support[i] if i < 2 else []), int(outcome.form.outside_token_ids[i])]
        assert candidates(position) == [expected(logits[i], token_id) for token_id in ids]
        assert top(position) == likeliest(logits[i], 4)


def test_what_the_target_cannot_emit_is_left_out() -> None:
    request = ScoreRequest(
        SessionSampling(opening(num_logprobs=0, top_k=3)), TOKENS, 4, (7,), support_of([list(range(VOCAB))])
    )
    logits = random_logits(2)
    logits[0, 7] = -9.0
    (outcome,) = score(logits, [request])
    kept = set(outcome.logprobs[0].token_ids.tolist())
    assert kept == {*logits[0].topk(3).indices.tolist(), 7}
    assert top(outcome.logprobs[0]) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_and_coupled_give_their_own_token(temperature: float) -> None:
    logits = random_logits(3)
    (outcome,) = score(
        logits,
        [ScoreRequest(SessionSampling(opening(COUPLED, temperature=temperature, num_logprobs=2)), TOKENS, 4, (7, 5))],
    )
    assert len(outcome.logprobs) == 3
    for i, position in enumerate(outcome.logprobs):
        token_id = outcome.form.token_ids[i]  # type: ignore[union-attr]
        assert candidates(position) == [expected(logits[i], token_id)]
        assert top(position) == likeliest(logits[i], 2)


def test_typical_gives_draft_token_and_argmax_then_the_bonus() -> None:
    logits = random_logits(3)
    best = int(logits[1].argmax())
    (outcome,) = score(logits, [ScoreRequest(SessionSampling(opening(TYPICAL, num_logprobs=1)), TOKENS, 4, (7, best))])
    assert isinstance(outcome.form, TypicalScores)
    ids = [position.token_ids.tolist() for position in outcome.logprobs]
    assert ids == [[7, int(logits[0].argmax())], [best], [outcome.form.bonus_token_id]]
    assert candidates(outcome.logprobs[0])[0] == expected(logits[0], 7)


def test_processed_logprobs_are_of_what_was_drawn_from() -> None:
    logits = random_logits(1)
    open_ = opening(COUPLED, num_logprobs=10, top_k=4, temperature=0.7, logprobs_mode=LogprobsMode.PROCESSED)
    request = ScoreRequest(SessionSampling(open_), TOKENS, 4)
    (outcome,) = score(logits, [request])
    processed = process_logits(logits, request.rows())[0]
    assert top(outcome.logprobs[0]) == likeliest(processed, 4)
    assert float(np.exp(outcome.logprobs[0].top_logprobs).sum()) == pytest.approx(1.0)


def test_ranks_of_equals_are_equal_and_the_lowest_ids_come_first() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 10, 20]] = 1.0
    logits[0, 5] = 2.0
    (few,) = prompt_logprobs(logits, [20], opening(num_prompt_logprobs=6))
    assert [(entry.token_id, entry.rank) for entry in candidates(few)] == [(20, 2)]
    assert few.top_token_ids.tolist() == [5, 10, 20, 30, 0, 1]
    wide = ScoreRequest(SessionSampling(opening(num_logprobs=0)), TOKENS, 4, (5,), support_of([[5, 10, 20, 30, 0, 39]]))
    (outcome,) = score(torch.cat([logits, logits]), [wide])
    assert outcome.logprobs[0].ranks.tolist()[:6] == [1, 2, 2, 2, 5, 5]


def test_nothing_is_computed_unasked() -> None:
    assert score(random_logits(1), [ScoreRequest(SessionSampling(opening(COUPLED)), TOKENS, 4)])[0].logprobs == ()


def test_prompt_logprobs_are_the_models_own() -> None:
    logits = random_logits(6)
    token_ids = [3, 0, 39, 17, 17, 2]
    positions = prompt_logprobs(logits, token_ids, opening(num_prompt_logprobs=2, temperature=0.1, top_k=1))
    for row, token_id, position in zip(logits, token_ids, positions, strict=True):
        assert candidates(position) == [expected(row, token_id)]
        assert top(position) == likeliest(row, 2)


def test_padded_ids_have_no_rank() -> None:
    logits = random_logits(1)
    logits[0, 35:] = 8.0
    (position,) = prompt_logprobs(logits, [3], opening(num_prompt_logprobs=3, num_token_ids=35))
    assert position.logprobs[0] == pytest.approx(logits[0].log_softmax(-1)[3].item())
    assert position.ranks[0] == 1 + int((logits[0, :35] > logits[0, 3]).sum())
    assert position.top_token_ids.shape == (3,)
    assert (position.top_token_ids < 35).all()


def test_more_than_the_vocabulary_has() -> None:
    (position,) = prompt_logprobs(random_logits(1), [3], opening(num_prompt_logprobs=VOCAB + 5))
    assert position.top_token_ids.shape == (VOCAB,)
