"""The n-gram proposer: the search, and what comes out of the service."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.ports import DraftEvent, Extend, Open, Opened, Proposal, SessionFailed, SessionLost
from outrider.prefix_hash import EMPTY_PREFIX, PrefixHash, prefix_hash
from outrider.types import JudgingRule, SamplingParams, SparseEvidence
from outrider_draft.proposers.text.ngram import NgramProposer, look_up
from outrider_draft.service import build_ngram_core

OPEN = Open(
    session=1,
    generation=1,
    sampling=SamplingParams(),
    seed=3,
    judging_rule=JudgingRule.REJECTION,
    prompt_length=4,
    max_length=100,
    num_token_ids=50,
)


def found(text: list[int], *, min_n: int = 1, max_n: int = 3, count: int = 4) -> list[int]:
    return [int(token) for token in look_up(np.array(text, dtype=np.int32), min_n=min_n, max_n=max_n, count=count)]


def ask(*commands: Open | Extend, min_n: int = 1, max_n: int = 3, max_model_len: int = 1000) -> list[DraftEvent]:
    core = build_ngram_core(min_n=min_n, max_n=max_n, max_model_len=max_model_len)
    core.handle(0, commands)
    events: list[DraftEvent] = []
    while core.has_work:
        events += [event for _, batch in core.step() for event in batch.events if not isinstance(event, Opened)]
    return events


def extend(
    token_ids: list[int], draft_length: int = 4, *, generation: int = 2, base: int = 0, kept: PrefixHash = EMPTY_PREFIX
) -> Extend:
    return Extend(1, generation, base, kept, tuple(token_ids), draft_length)


def propose(opened: Open, token_ids: list[int], draft_length: int = 4) -> Proposal:
    (event,) = ask(opened, extend(token_ids, draft_length))
    assert isinstance(event, Proposal)
    return event


def test_the_longest_ending_wins_over_a_shorter_one() -> None:
    assert found([3, 9, 1, 2, 3, 7, 8, 3, 5, 1, 2, 3]) == [7, 8, 3, 5]


def test_of_equal_length_the_earliest_wins() -> None:
    assert found([1, 2, 7, 1, 2, 8, 1, 2], count=1) == [7]


def test_a_match_may_reach_into_the_ending() -> None:
    assert found([5, 5, 5, 5], count=4) == [5]
    assert found([1, 2, 1, 2, 1, 2], max_n=2, count=4) == [1, 2, 1, 2]


def test_fewer_than_asked_and_none_are_fine() -> None:
    assert found([1, 2, 9, 1, 2], count=10) == [9, 1, 2]
    assert found([1, 2, 3]) == []
    assert found([1, 1, 2], min_n=2) == []
    assert found([1]) == []
    assert found([1, 1], count=0) == []


def test_the_search_agrees_with_a_plain_one() -> None:
    def plain(text: list[int], min_n: int, max_n: int, count: int) -> list[int]:
        for n in range(max_n, min_n - 1, -1):
            for start in range(len(text) - n):
                if n <= len(text) and text[start : start + n] == text[len(text) - n :]:
                    return text[start + n : start + n + count]
        return []

    generator = random.Random(5)
    for _ in range(2000):
        text = [generator.randrange(3) for _ in range(generator.randint(1, 14))]
        min_n = generator.randint(1, 3)
        max_n = min_n + generator.randint(0, 3)
        assert found(text, min_n=min_n, max_n=max_n) == plain(text, min_n, max_n, 4), (text, min_n, max_n)


def test_rejection_gets_a_certain_distribution_as_evidence() -> None:
    proposal = propose(OPEN, [1, 2, 7, 8, 1, 2])
    assert proposal.token_ids == (7, 8, 1, 2)
    assert proposal.base_length == 6
    assert isinstance(proposal.evidence, SparseEvidence)
    assert proposal.evidence.counts.tolist() == [1] * 4
    assert proposal.evidence.token_ids.tolist() == [7, 8, 1, 2]
    assert proposal.evidence.probs.tolist() == [1.0] * 4
    assert proposal.evidence.probs.dtype == np.float32


@pytest.mark.parametrize(
    "opened",
    [
        replace(OPEN, judging_rule=JudgingRule.COUPLED),
        replace(OPEN, judging_rule=JudgingRule.TYPICAL),
        replace(OPEN, judging_rule=JudgingRule.GREEDY, sampling=SamplingParams(temperature=0.0)),
    ],
)
def test_other_rules_need_no_evidence(opened: Open) -> None:
    proposal = propose(opened, [1, 2, 7, 1, 2])
    assert proposal.token_ids == (7, 1, 2)
    assert proposal.evidence is None


def test_nothing_found_is_an_empty_proposal_without_evidence() -> None:
    proposal = propose(OPEN, [1, 2, 3])
    assert (proposal.token_ids, proposal.evidence) == ((), None)


def test_ids_that_may_not_be_drawn_end_the_proposal() -> None:
    assert propose(replace(OPEN, num_token_ids=8), [1, 2, 7, 8, 1, 2]).token_ids == (7,)


def test_a_proposal_stays_within_the_session_and_the_draft() -> None:
    assert propose(replace(OPEN, max_length=7), [1, 2, 7, 8, 1, 2]).token_ids == (7,)
    (event,) = ask(OPEN, extend([1, 2, 7, 8, 1, 2]), max_model_len=5)
    assert event == Proposal(1, 2, 6, ())


def test_text_is_kept_by_length() -> None:
    prompt = [1, 2, 7, 8, 1, 2]
    core = build_ngram_core(min_n=1, max_n=3)
    core.handle(0, [OPEN])
    kept = prefix_hash(prompt)
    for item, expected in [
        (extend(prompt, 1), Proposal(1, 2, 6, (7,))),
        (extend([7, 8], 2, generation=3, base=6, kept=kept), Proposal(1, 3, 8, (1, 2))),
        (extend([7, 9, 7], 2, generation=4, base=6, kept=kept), Proposal(1, 4, 9, (8, 1))),
        (extend([], 1, generation=5, base=6, kept=kept), Proposal(1, 5, 6, (7,))),
    ]:
        core.handle(0, [item])
        (event,) = [event for _, batch in core.step() for event in batch.events if not isinstance(event, Opened)]
        assert isinstance(event, Proposal)
        assert replace(event, evidence=None) == expected


def test_another_text_is_lost() -> None:
    core = build_ngram_core(min_n=1, max_n=3)
    core.handle(0, [OPEN, extend([1, 2, 3])])
    core.step()
    core.handle(0, [extend([4], generation=3, base=3, kept=(b"", 17))])
    ((_, batch),) = core.step()
    (event,) = batch.events
    assert isinstance(event, SessionLost)


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("token_ids", extend([])),
        ("token_ids", extend([-1])),
        ("token_ids", extend([2**31])),
        ("token_ids", extend([1] * 101)),
        ("draft_length", extend([1], -1)),
        ("num_kept_tokens", extend([1], base=-1)),
    ],
)
def test_a_bad_item_fails_its_session_alone(field: str, item: Extend) -> None:
    failed, proposal = ask(OPEN, replace(OPEN, session=2), item, replace(extend([1, 2, 1]), session=2))
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.field) == (1, field)
    assert isinstance(proposal, Proposal)
    assert proposal.token_ids == (2, 1)


@pytest.mark.parametrize(("min_n", "max_n", "field"), [(0, 3, "prompt_lookup_min"), (4, 3, "prompt_lookup_max")])
def test_bad_bounds_are_refused(min_n: int, max_n: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        NgramProposer(min_n=min_n, max_n=max_n)
