"""The toys themselves: what they say must be right before anything is tested against them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from outrider.errors import UnavailableError
from outrider.ports import Extend, Open, Proposal, Refused, Release, Score, Scores, SessionLost
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.types import (
    JudgingRule,
    SamplingParams,
    SparseEvidence,
    SparseScores,
    Support,
    TokenScores,
)
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows, reversed_rows
from tests.support.toy_language import noise

V = 7
ROWS = random_rows(V, seed=3)
PROMPT = (1, 2, 3)


def opening(generation: int = 1, **more: Any) -> Open:
    fields: dict[str, Any] = {
        "session": 5,
        "generation": generation,
        "sampling": SamplingParams(),
        "seed": 17,
        "judging_rule": JudgingRule.REJECTION,
        "prompt_length": len(PROMPT),
        "max_length": 16,
        "num_token_ids": V,
    }
    return Open(**(fields | more))


def test_greedy_scores_are_the_argmaxes_and_state_goes_by_length() -> None:
    core = ToyTarget(ROWS, V).core()
    core.handle([opening(judging_rule=JudgingRule.GREEDY, sampling=SamplingParams(temperature=0))])
    (scores,) = core.handle([Score(5, 2, 0, EMPTY_PREFIX, PROMPT, (4, 0))]).events
    assert isinstance(scores, Scores) and isinstance(scores.form, TokenScores)
    assert scores.base_length == 3
    expected = tuple(int(ROWS(text).argmax()) for text in ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 0)))
    assert scores.form.token_ids == expected
    (again,) = core.handle([Score(5, 3, 3, prefix_hash(PROMPT), (4,), (0,))]).events
    assert isinstance(again, Scores) and isinstance(again.form, TokenScores)
    assert again.form.token_ids == expected[1:]
    (lost,) = core.handle([Score(5, 4, 3, (b"", 99), (4,))]).events
    assert isinstance(lost, SessionLost)


def test_sparse_scores_and_evidence_describe_the_rows() -> None:
    draft, target = ToyDraft(reversed_rows(ROWS), V, support_mass=0.8).core(), ToyTarget(ROWS, V).core()
    draft.handle([opening()])
    target.handle([opening()])
    (proposal,) = draft.handle([Extend(5, 2, 0, EMPTY_PREFIX, PROMPT, 2)]).events
    assert isinstance(proposal, Proposal) and isinstance(proposal.evidence, SparseEvidence)
    assert len(proposal.token_ids) == 2 and proposal.base_length == 3
    evidence = proposal.evidence
    row = reversed_rows(ROWS)(PROMPT)
    ids = evidence.token_ids[: evidence.counts[0]]
    assert row[ids].sum() >= 0.8 > row[ids[:-1]].sum()
    np.testing.assert_allclose(evidence.probs[: evidence.counts[0]], row[ids] / row[ids].sum(), rtol=1e-6)
    support = Support(evidence.counts, evidence.token_ids)
    (scores,) = target.handle([Score(5, 2, 0, EMPTY_PREFIX, PROMPT, proposal.token_ids, support)]).events
    assert isinstance(scores, Scores) and isinstance(scores.form, SparseScores)
    distribution = ROWS(PROMPT)
    np.testing.assert_allclose(scores.form.support_probs[: len(ids)], distribution[ids], rtol=1e-6)
    assert scores.form.outside_mass[0] == pytest.approx(1 - distribution[ids].sum(), abs=1e-6)
    assert scores.form.outside_mass[-1] == pytest.approx(1)
    assert int(scores.form.outside_token_ids[0]) not in ids


def test_draws_follow_the_row() -> None:
    draft = ToyDraft(ROWS, V, support_mass=1.0).core()
    counts = np.zeros(V)
    for seed in range(4000):
        draft.handle([opening(generation=2 * seed + 1, seed=seed)])
        (proposal,) = draft.handle([Extend(5, 2 * seed + 2, 0, EMPTY_PREFIX, PROMPT, 1)]).events
        assert isinstance(proposal, Proposal)
        counts[proposal.token_ids[0]] += 1
    expected = ROWS(PROMPT) * 4000
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # chi-square, 6 degrees: p = 1e-4


def test_both_forms_of_noise_agree() -> None:
    from outrider.randomness.streams import Stream

    few = noise(9, Stream.COUPLED, base=0, position=4, token_ids=range(60))
    many = noise(9, Stream.COUPLED, base=0, position=4, token_ids=range(100))
    np.testing.assert_allclose(few, many[:60], rtol=1e-4, atol=1e-5)


def test_pages_are_reserved_refused_and_given_back() -> None:
    target = ToyTarget(ROWS, V, page_size=4, num_pages=4)
    core = target.core()
    core.handle([opening()])
    assert target.num_pages_free == 0
    (refused,) = core.handle([opening(session=6)]).events
    assert isinstance(refused, Refused)
    core.handle([Release(5, 9)])
    assert target.num_pages_free == 4
    assert core.handle([Score(5, 10, 0, EMPTY_PREFIX, PROMPT)]).events == ()


async def test_faults_over_a_link() -> None:
    draft = ToyDraft(ROWS, V)
    link = await draft.attach()
    draft.faults.hold = True
    link.send([opening()])
    link.send([Extend(5, 2, 0, EMPTY_PREFIX, PROMPT, 1)])
    events = link.events()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert not waiting.done()
    draft.release_held()
    assert isinstance((await waiting).events[0], Proposal)
    draft.break_links()
    with pytest.raises(UnavailableError):
        await anext(events)
    with pytest.raises(UnavailableError):
        link.send([])
    draft.faults.unreachable = True
    with pytest.raises(UnavailableError):
        await draft.attach()
    assert draft.num_pages_free == 1_000_000
