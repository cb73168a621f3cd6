"""Proposing and scoring together: three tokens of rejection sampling follow the target's joint distribution.

The judge here is a small one of the test's own; the coordinator has the real one. Draft and target are Markov chains
over four tokens, so that all 64 outcomes are enumerated. The same test with a shared stream, or with evidence of a
distribution that is not the one drawn from, must fail: that is checked too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.kernels.draft_sampling.layout import NUM_FIELDS, DraftSink, DrawColumn, Field
from outrider.kernels.draft_sampling.reference import ReferenceSampler
from outrider.model_executor.draft_loop import DraftMetadata
from outrider.ports import Open
from outrider.randomness.philox_numpy import coin
from outrider.randomness.streams import Stream
from outrider.sampling import Drawn, LogitRow, ScoreRequest, process_logits, propose, score
from outrider.sampling.session import SessionSampling
from outrider.sampling.support import DraftingRules
from outrider.types import JudgingRule, SparseScores, Support, TokenScores
from tests.sampling.building import COUPLED, REJECTION, opening

VOCAB = 4
NUM_TOKENS = 3
DRAFT_LENGTH = 2
NUM_SESSIONS = 2_500
PROMPT = (0,)

Evidence = Callable[[Drawn], tuple[np.ndarray, np.ndarray]]
Propose = Callable[[torch.Tensor, list[LogitRow], float], list[Drawn]]


def reported(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    assert drawn.support_ids is not None
    assert drawn.support_probs is not None
    return drawn.support_ids, drawn.support_probs


def falsified(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Evidence that flattens the distribution the token was drawn from."""
    ids, probs = reported(drawn)
    flat = probs**0.5
    return ids, (flat / flat.sum()).astype(np.float32)


@dataclass
class Session:
    open: Open
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    drafts: list[int] = field(default_factory=list)
    evidence: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    sampling: SessionSampling = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = SessionSampling(self.open)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(PROMPT)


def table(seed: int, scale: float) -> torch.Tensor:
    """Logits of the next token, for each token before it."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


TARGET = table(1, 1.2)
DRAFTS = {"good": TARGET + table(2, 0.4), "unrelated": table(3, 1.5), "reversed": -TARGET}


def from_logits(logits: torch.Tensor, rows: list[LogitRow], mass: float) -> list[Drawn]:
    return propose(logits, rows, DraftingRules(support_mass=mass))


def in_a_loop(logits: torch.Tensor, rows: list[LogitRow], mass: float) -> list[Drawn]:
    """Draw as a step of a draft loop does."""
    parameters = []
    for row in rows:
        metadata = DraftMetadata.of(row.open, VOCAB)
        words = metadata.words.tolist()
        base = row.base if metadata.keys_base else 0
        words[DrawColumn.BASE], words[DrawColumn.POSITION], words[DrawColumn.LENGTH] = base, row.length, 1
        parameters.append(words)
    count = len(rows)
    shapes = ((1,), (count,), (1, count, NUM_FIELDS), (1, count, 2, VOCAB))
    sink = DraftSink(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
    ReferenceSampler(mass=mass, limit=VOCAB)(logits, torch.tensor(parameters, dtype=torch.int32), sink)
    records, supports = sink.records[0].numpy(), sink.supports[0].numpy()
    return [
        Drawn(int(record[Field.TOKEN]), own[0, : record[Field.WIDTH]], own[1, : record[Field.WIDTH]].view(np.float32))
        for record, own in zip(records, supports, strict=True)
    ]


def draft(
    sessions: list[Session], logits: torch.Tensor, evidence: Evidence, mass: float, drawing: Propose = from_logits
) -> None:
    for session in sessions:
        session.drafts, session.evidence = [], []
    for _ in range(DRAFT_LENGTH):
        texts = [session.tokens + session.drafts for session in sessions]
        rows = [LogitRow(s.sampling, text, len(text), len(s.tokens)) for s, text in zip(sessions, texts, strict=True)]
        for session, drawn in zip(sessions, drawing(logits[[text[-1] for text in texts]], rows, mass), strict=True):
            session.drafts.append(drawn.token_id)
            if session.open.judging_rule is JudgingRule.REJECTION:
                session.evidence.append(evidence(drawn))


def verify(sessions: list[Session], residual_stream: Stream) -> None:
    requests, previous = [], []
    for session in sessions:
        support = None
        if session.evidence:
            counts = np.array([len(ids) for ids, _ in session.evidence], dtype=np.int32)
            support = Support(counts, np.concatenate([ids for ids, _ in session.evidence]))
        requests.append(ScoreRequest(session.sampling, session.tokens, len(session.tokens), session.drafts, support))
        previous.extend([session.tokens[-1], *session.drafts])
    for session, outcome in zip(sessions, score(TARGET[previous], requests), strict=True):
        assert outcome.error is None
        if isinstance(outcome.form, TokenScores):
            judge_tokens(session, outcome.form)
        elif isinstance(outcome.form, SparseScores):
            judge_sparse(session, outcome.form, residual_stream)


def judge_tokens(session: Session, form: TokenScores) -> None:
    for draft_id, own_id in zip(session.drafts, form.token_ids, strict=False):
        session.tokens.append(own_id)
        if draft_id != own_id:
            return
    session.tokens.append(form.token_ids[-1])


def judge_sparse(session: Session, form: SparseScores, residual_stream: Stream) -> None:
    seed, base, start = session.open.seed, len(session.tokens), 0
    for i, (draft_id, (ids, draft_probs)) in enumerate(zip(session.drafts, session.evidence, strict=True)):
        target_probs = form.support_probs[start : start + len(ids)].astype(np.float64)
        start += len(ids)
        place = int(np.flatnonzero(ids == draft_id)[0])
        if coin(seed, Stream.ACCEPTANCE, base, base + i) * draft_probs[place] < target_probs[place]:
            session.tokens.append(draft_id)
            continue
        weights = np.append(np.maximum(target_probs - draft_probs, 0), form.outside_mass[i])
        token_ids = np.append(ids, form.outside_token_ids[i])
        borders = np.cumsum(weights)
        chosen = np.searchsorted(borders, coin(seed, residual_stream, base, base + i) * borders[-1], side="right")
        session.tokens.append(int(token_ids[chosen]))
        return
    session.tokens.append(int(form.outside_token_ids[-1]))


def p_value(
    open_fields: dict[str, Any],
    draft_name: str,
    *,
    method: object = REJECTION,
    mass: float = 1.0,
    evidence: Evidence = reported,
    residual_stream: Stream = Stream.RESIDUAL,
    drawing: Propose = from_logits,
    num_sessions: int = NUM_SESSIONS,
) -> float:
    sessions = [
        Session(opening(method, seed=1_000_003 * i, prompt_length=1, **open_fields))  # type: ignore[arg-type]
        for i in range(num_sessions)
    ]
    while running := [session for session in sessions if session.num_output_tokens < NUM_TOKENS]:
        draft(running, DRAFTS[draft_name], evidence, mass, drawing)
        verify(running, residual_stream)
    observed = np.zeros((VOCAB,) * NUM_TOKENS)
    for session in sessions:
        observed[tuple(session.tokens[1 : 1 + NUM_TOKENS])] += 1
    expected = joint_law(sessions[0].open) * num_sessions
    assert observed[expected == 0].sum() == 0
    rare = expected < 5
    left, right = (np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected))
    return float(stats.chisquare(left[right > 0], right[right > 0]).pvalue)


def joint_law(open_: Open) -> np.ndarray:
    rows = [LogitRow(SessionSampling(open_), (), 1, 1)] * VOCAB
    after = process_logits(TARGET, rows).double().softmax(-1).numpy()
    distribution = np.zeros((VOCAB,) * NUM_TOKENS)
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        distribution[tokens] = np.prod([after[a, b] for a, b in itertools.pairwise((*PROMPT, *tokens))])
    return distribution


@pytest.mark.parametrize(
    ("open_fields", "draft_name", "mass"),
    [
        ({}, "good", 1.0),
        ({}, "good", 0.6),
        pytest.param({}, "unrelated", 0.9, marks=pytest.mark.integration),
        ({"temperature": 0.7}, "reversed", 0.7),
        ({"top_k": 3, "top_p": 0.9}, "unrelated", 1.0),
    ],
)
def test_rejection_follows_the_target(open_fields: dict[str, float], draft_name: str, mass: float) -> None:
    assert p_value(open_fields, draft_name, mass=mass) > 1e-3


@pytest.mark.parametrize("draft_name", ["good", "reversed"])
def test_coupled_follows_the_target(draft_name: str) -> None:
    assert p_value({}, draft_name, method=COUPLED) > 1e-3


IN_A_LOOP: dict[str, Any] = {"drawing": in_a_loop, "num_sessions": 1_500}


@pytest.mark.parametrize(
    ("open_fields", "draft_name"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, "good"),
        pytest.param({"temperature": 0.7, "top_p": 0.8, "top_k": 2}, "unrelated", marks=pytest.mark.integration),
        ({"min_p": 0.2, "logit_bias": ((1, 1.5), (3, -1.0))}, "good"),  # a loop leaves biases to the target
    ],
)
def test_rejection_follows_the_target_when_a_loop_cuts_what_it_draws_from(
    open_fields: dict[str, Any], draft_name: str
) -> None:
    assert p_value(open_fields, draft_name, **IN_A_LOOP) > 1e-3


@pytest.mark.integration
def test_coupled_follows_the_target_when_a_loop_cuts_what_it_draws_from() -> None:
    assert p_value({"temperature": 0.9, "top_p": 0.8}, "good", method=COUPLED, **IN_A_LOOP) > 1e-3


def test_evidence_of_another_distribution_than_a_loop_drew_from_is_noticed() -> None:
    assert p_value({"top_p": 0.95}, "unrelated", evidence=falsified, **IN_A_LOOP) < 1e-6


def test_a_stream_shared_by_coin_and_residual_is_noticed() -> None:
    assert p_value({}, "unrelated", mass=0.9, residual_stream=Stream.ACCEPTANCE) < 1e-6


def test_evidence_of_another_distribution_is_noticed() -> None:
    assert p_value({}, "unrelated", evidence=falsified) < 1e-6
