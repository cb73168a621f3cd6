"""Output under a grammar follows the target's masked law, for drafts that are masked and for drafts that are not.

The letters a, b and c are Markov chains, and a grammar allows some pairs of them. Cutting a proposal at the first draft
token that the grammar refuses, instead of judging it, must be noticed.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.randomness.streams import Stream
from outrider.sampling import process_logits
from outrider.sampling.rows import LogitRow
from outrider.sampling.session import SessionSampling
from outrider.structured_output import Outcome
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, JudgingRule
from tests.sampling.building import COUPLED, REJECTION, opening
from tests.sampling.test_exactness import DRAFTS, NUM_TOKENS, TARGET, VOCAB, Session, draft, reported, verify
from tests.structured_output.vocabularies import letters

COMPILER = letters("abc")
END = 3
FOLLOWERS = {"a": "bc", "b": "ab", "c": "a"}
LENGTH = 8
TEXTS = [
    "".join(text)
    for text in itertools.product("abc", repeat=LENGTH)
    if all(second in FOLLOWERS[first] for first, second in itertools.pairwise(text))
]
GRAMMAR = Grammar(GrammarKind.CHOICE, json.dumps(TEXTS))
NUM_SESSIONS = 1_200
"""Each draws three tokens: 3,600 draws."""
MANY_SESSIONS = 33_334
FORCED = "b"
"""A point mass, as forced text is proposed with; here the grammar leaves a choice, and it may be wrong."""


def sessions_of(method: AcceptanceMethod, count: int, **fields: Any) -> list[Session]:
    made = [
        Session(opening(method, seed=1_000_003 * i, prompt_length=1, eos_token_ids=(END,), grammar=GRAMMAR, **fields))
        for i in range(count)
    ]
    for session in made:
        session.sampling = SessionSampling(session.open, COMPILER)
    return made


def masked_law(**fields: Any) -> np.ndarray:
    """Enumerated without a matcher."""
    logits = TARGET.clone().double()
    for previous, (token_id, letter) in itertools.product(range(VOCAB), enumerate("abc")):
        if previous < 3 and letter not in FOLLOWERS["abc"[previous]]:
            logits[previous, token_id] = -np.inf
    logits[:, END] = -np.inf
    first = TARGET[0].clone().double()
    first[END] = -np.inf
    rows = [LogitRow(SessionSampling(opening(prompt_length=1, **fields)), (), 1, 1)] * (VOCAB + 1)
    after = process_logits(torch.cat([logits, first[None]]).float(), rows).double().softmax(-1).numpy()
    law = np.zeros((VOCAB,) * NUM_TOKENS)
    for tokens in itertools.product(range(3), repeat=NUM_TOKENS):
        pairs = itertools.pairwise(tokens)
        law[tokens] = after[VOCAB, tokens[0]] * np.prod([after[first, second] for first, second in pairs])
    return law


def cut(sessions: list[Session]) -> None:
    """Drop draft tokens from the first that the grammar refuses: biased."""
    for session in sessions:
        matcher = COMPILER.compile(GRAMMAR, (END,))
        drafts = session.drafts
        kept = next(
            (
                count
                for count in range(len(drafts))
                if matcher.follow([*session.tokens[1:], *drafts[: count + 1]]) is Outcome.REFUSED
            ),
            len(drafts),
        )
        session.drafts, session.evidence = drafts[:kept], session.evidence[:kept]


def propose_forced(sessions: list[Session]) -> None:
    """Two tokens with all probability on each, as the coordinator proposes without a draft."""
    row = np.array([ord(FORCED) - ord("a")], dtype=np.int32), np.ones(1, dtype=np.float32)
    for session in sessions:
        session.drafts = [int(row[0][0])] * 2
        session.evidence = [row] * 2 if session.open.judging_rule is JudgingRule.REJECTION else []


def p_value(
    draft_name: str,
    *,
    method: AcceptanceMethod = REJECTION,
    masks_drafts: bool,
    cuts: bool = False,
    mass: float = 1.0,
    num_sessions: int = NUM_SESSIONS,
    **fields: Any,
) -> float:
    sessions = sessions_of(method, num_sessions, **fields)
    masked = {id(session): session.sampling for session in sessions}
    while running := [session for session in sessions if session.num_output_tokens < NUM_TOKENS]:
        for session in running:
            session.sampling = masked[id(session)] if masks_drafts else SessionSampling(session.open)
        if draft_name == FORCED:
            propose_forced(running)
        else:
            draft(running, DRAFTS[draft_name], reported, mass)
        if cuts:
            cut(running)
        for session in running:
            session.sampling = masked[id(session)]
        verify(running, Stream.RESIDUAL)
    observed = np.zeros((VOCAB,) * NUM_TOKENS)
    for session in sessions:
        observed[tuple(session.tokens[1 : 1 + NUM_TOKENS])] += 1
    expected = masked_law(**fields) * num_sessions
    assert observed[expected == 0].sum() == 0
    rare = expected < 5
    left, right = (np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected))
    return float(stats.chisquare(left[right > 0], right[right > 0]).pvalue)


@pytest.mark.parametrize("masks_drafts", (True, False))
@pytest.mark.parametrize(
    ("draft_name", "mass", "fields"),
    (
        ("good", 1.0, {}),
        pytest.param("unrelated", 0.7, {}, marks=pytest.mark.integration),
        ("reversed", 0.8, {"temperature": 0.7, "top_p": 0.9}),
    ),
)
def test_rejection_follows_the_masked_law(
    draft_name: str, mass: float, fields: dict[str, Any], *, masks_drafts: bool
) -> None:
    assert p_value(draft_name, mass=mass, masks_drafts=masks_drafts, **fields) > 1e-3


@pytest.mark.parametrize("masks_drafts", (pytest.param(True, marks=pytest.mark.integration), False))
def test_coupled_follows_the_masked_law(*, masks_drafts: bool) -> None:
    assert p_value("unrelated", method=COUPLED, masks_drafts=masks_drafts) > 1e-3


@pytest.mark.parametrize("method", (REJECTION, COUPLED))
def test_proposals_of_a_point_mass_follow_the_masked_law(method: AcceptanceMethod) -> None:
    assert p_value(FORCED, method=method, masks_drafts=False) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("draft_name", ("unrelated", FORCED))
@pytest.mark.parametrize("method", (REJECTION, COUPLED))
def test_100_000_draws_follow_the_masked_law(method: AcceptanceMethod, draft_name: str) -> None:
    assert p_value(draft_name, method=method, masks_drafts=False, num_sessions=MANY_SESSIONS) > 1e-3


def test_proposals_cut_before_they_are_judged_are_noticed() -> None:
    assert p_value("unrelated", masks_drafts=False, cuts=True) < 1e-6
