"""Logprobs beside the scoring kernels are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.sampling.logprobs import drawable_logprobs, position_logprobs
from outrider.sampling.scoring.row_logprobs import MOST_LOGPROB_ROWS, RowLogprobs
from outrider.sampling.session import SessionSampling
from outrider.types import CandidateLogprobs
from tests.support.core_driver import open_session

VOCAB_SIZE = 384


def _sampling(session: int, num_logprobs: int | None, num_token_ids: int = VOCAB_SIZE) -> SessionSampling:
    opened = open_session(
        session, prompt_length=3, max_length=50, num_token_ids=num_token_ids, num_logprobs=num_logprobs
    )
    return SessionSampling(opened)


def _plain(rows: list[tuple[CandidateLogprobs, ...]]) -> object:
    names = CandidateLogprobs.__slots__
    return [[[getattr(each, name).tolist() for name in names] for each in row] for row in rows]


@pytest.mark.parametrize("asked", [(2,), (2, None, 0, 2, 5), (None, 3, None)])
def test_rows_of_each_session_are_those_of_the_reference(asked: tuple[int | None, ...]) -> None:
    samplings = [_sampling(place, each) for place, each in enumerate(asked)]
    samplings.append(_sampling(9, 2, num_token_ids=300))
    counts = np.arange(1, len(samplings) + 1, dtype=np.int64)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(int(counts.sum()), VOCAB_SIZE, generator=generator).round(decimals=1)  # with equal ones
    tokens = torch.randint(0, 300, (len(logits),), generator=generator, dtype=torch.int32)
    found = RowLogprobs(logits, tokens, samplings, counts).batched(tokens.numpy()).rows()
    expected: list[tuple[CandidateLogprobs, ...]] = []
    for sampling, end, count in zip(samplings, counts.cumsum().tolist(), counts.tolist(), strict=True):
        own, num_top = slice(end - count, end), sampling.open.num_logprobs
        logprobs = drawable_logprobs(logits[own].clone(), sampling.open.num_token_ids)
        candidates = [[token_id] for token_id in tokens[own].tolist()]
        expected.append(() if num_top is None else position_logprobs(logprobs, candidates, num_top))
    assert _plain(found) == _plain(expected)


def test_many_rows_are_computed_in_parts() -> None:
    samplings = [_sampling(place, 1) for place in range(3)]
    counts = np.full(3, MOST_LOGPROB_ROWS // 2 + 1, dtype=np.int64)
    logits = torch.randn(int(counts.sum()), VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    tokens = logits.argmax(-1).to(torch.int32)
    found = RowLogprobs(logits, tokens, samplings, counts).batched(tokens.numpy())
    assert found.num_positions.tolist() == counts.tolist()
    assert found.ranks.tolist() == [1] * len(logits)
    assert found.token_ids.tolist() == found.top_token_ids.tolist() == tokens.tolist()
