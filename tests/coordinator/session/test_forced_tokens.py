"""Tokens that a grammar forces are proposed without a draft, as a point mass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.ports import Score
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, SparseEvidence
from outrider_coordinator.session import steps
from outrider_coordinator.session.actions import ToDraft, ToTarget
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.forced_tokens import MAX_FORCED_TOKENS, forced_proposal
from outrider_coordinator.session.state import SessionState
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
from tests.coordinator.driving import make_plan
from tests.structured_output.vocabularies import letters

ALPHABET = "abcdefgh"
EOS = len(ALPHABET)


def session_of(regex: str, *, draft_length: int = 0, after: str = "", **fields: Any) -> SessionState:
    """A session whose target has the prompt."""
    matcher = letters(ALPHABET).compile(Grammar(GrammarKind.REGEX, regex, after), (EOS,))
    plan = make_plan(vocab_size=EOS + 1, matcher=matcher, eos_token_ids=(EOS,), **{"max_tokens": 40, **fields})
    has_draft = draft_length > 0
    policy = DraftLengthPolicy(draft_length, has_draft=has_draft)
    session = SessionState(plan, policy, draft=DraftFacts() if has_draft else None)
    session.target.held = len(plan.prompt_token_ids)
    return session


def ids(text: str) -> tuple[int, ...]:
    return tuple(ALPHABET.index(letter) for letter in text)


@pytest.mark.parametrize("draft_length", (0, 4))
def test_forced_text_goes_to_the_target_alone(draft_length: int) -> None:
    session = session_of("abcde[fg]h", draft_length=draft_length)
    steps.begin(session)
    commands = [action.command for action in session.actions if isinstance(action, ToTarget)]
    (score,) = [command for command in commands if isinstance(command, Score)]
    assert score.draft_token_ids == ids("abcde")
    assert not any(isinstance(action, ToDraft) for action in session.actions)
    assert session.no_draft_reason is WithoutDraft.FORCED


def test_a_single_forced_token_is_left_to_a_draft() -> None:
    for draft_length in (0, 4):
        session = session_of("a[bc]d", draft_length=draft_length)
        steps.begin(session)
        assert bool(session.proposal.token_ids) == (draft_length == 0)
        assert any(isinstance(action, ToDraft) for action in session.actions) == (draft_length > 0)


@pytest.mark.parametrize(("num_others", "least"), ((0, 3), (1, 4), (5, 8)))
def test_few_forced_tokens_are_left_to_steps_that_are_computed_ahead(num_others: int, least: int) -> None:
    for count in (least - 1, least):
        session = session_of("abcdefgh"[:count] + "[ab]")
        for each in [session.speculation, *(session.policy.session(0) for _ in range(num_others))]:
            session.policy.enter(each, "a target")
        session.target.lookahead_credit = 9
        steps.begin(session)
        assert bool(session.proposal.token_ids) == (count == least)


@pytest.mark.parametrize("method", AcceptanceMethod)
def test_the_evidence_is_a_point_mass(method: AcceptanceMethod) -> None:
    found = forced_proposal(session_of("abc", method=method))
    assert found.token_ids == ids("abc")
    if method is not AcceptanceMethod.REJECTION:
        assert found.evidence is None
        return
    evidence = found.evidence
    assert isinstance(evidence, SparseEvidence)
    assert evidence.counts.tolist() == [1] * 3 and evidence.token_ids.tolist() == list(ids("abc"))
    assert np.array_equal(evidence.probs, np.ones(3, dtype=np.float32))


def test_no_more_tokens_than_are_of_use() -> None:
    assert len(forced_proposal(session_of("abcde" * 9)).token_ids) == MAX_FORCED_TOKENS
    assert forced_proposal(session_of("abcde", max_tokens=3)).token_ids == ids("ab")
    assert forced_proposal(session_of("abcde", max_tokens=1)).token_ids == ()


def test_nothing_is_forced_where_there_is_a_choice_or_free_text() -> None:
    assert forced_proposal(session_of("[ab]c")).token_ids == ()
    assert forced_proposal(session_of("abc", after="h")).token_ids == ()
    plain = SessionState(make_plan(vocab_size=4), DraftLengthPolicy(0, has_draft=False))
    assert forced_proposal(plain).token_ids == ()
