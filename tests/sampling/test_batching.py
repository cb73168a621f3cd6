"""A session's result is its own, to the last bit, at the sizes where torch splits work among threads and lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.ports import Open
from outrider.sampling import Drawn, LogitRow, ScoreRequest, propose, score
from outrider.sampling.session import SessionSampling
from tests.sampling.building import COUPLED, REJECTION, TYPICAL, opening, support_of
from tests.support.equality import same

NUM_SESSIONS = 7
BASE = 20
KINDS: dict[str, dict[str, Any]] = {
    "rejection": {"method": REJECTION},
    "truncated": {"method": REJECTION, "top_p": 0.95, "top_k": 300, "min_p": 1e-4, "temperature": 0.8},
    "penalised": {"method": REJECTION, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "num_logprobs": 3},
    "coupled": {"method": COUPLED, "temperature": 1.2},
    "typical": {"method": TYPICAL, "top_p": 0.9},
    "greedy": {"method": TYPICAL, "temperature": 0.0},
}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def openings(kind: str) -> list[Open]:
    """Sessions of one kind, or of all kinds in turn."""
    names = list(KINDS) if kind == "mixed" else [kind]
    return [
        opening(session=i, seed=100 + i, **{**KINDS[names[i % len(names)]], "prompt_length": 15 + i % 3})
        for i in range(NUM_SESSIONS)
    ]


def random_logits(num_rows: int, vocab: int) -> torch.Tensor:
    scales = torch.linspace(0.5, 5, num_rows).unsqueeze(-1)
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scales


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab", [97, 33_001])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_proposing(kind: str, vocab: int) -> None:
    rows = [
        LogitRow(SessionSampling(open_), list(range(BASE + 3)), BASE + i % 4, BASE)
        for i, open_ in enumerate(openings(kind))
    ]
    logits = random_logits(len(rows), vocab)
    together = propose(logits, rows)
    alone: list[Drawn] = []
    for i, row in enumerate(rows):
        alone.extend(propose(logits[i : i + 1].clone(), [row]))
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.error is None
        assert same(ours, theirs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab", [97, 33_001])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_scoring(kind: str, vocab: int) -> None:
    tokens = list(range(BASE))
    requests = []
    for i, open_ in enumerate(openings(kind)):
        drafts = [5, 3, 90][: i % 4]
        support = support_of([[draft, *range(10, 12 + 3 * i)] for draft in drafts])
        requests.append(ScoreRequest(SessionSampling(open_), tokens, BASE, drafts, support))
    logits = random_logits(sum(request.num_positions for request in requests), vocab)
    together = score(logits, requests)
    parts = torch.split(logits, [request.num_positions for request in requests])
    for request, part, ours in zip(requests, parts, together, strict=True):
        assert ours.error is None
        assert same(ours, score(part.clone(), [request])[0])
