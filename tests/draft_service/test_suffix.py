"""Suffix decoding: the automaton counts as counting by hand does, and proposals are what the paper's rule gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.ports import Open
from outrider.types import JudgingRule, SamplingParams
from outrider_draft.proposers.base import ProposalRequest
from outrider_draft.proposers.text.suffix import OutputCache, SuffixProposer
from outrider_draft.proposers.text.suffix_automaton import ROOT, SuffixAutomaton

OPEN = Open(
    session=1,
    generation=1,
    sampling=SamplingParams(),
    seed=3,
    judging_rule=JudgingRule.COUPLED,
    prompt_length=4,
    max_length=1000,
    num_token_ids=50,
)


def occurrences(texts: Sequence[Sequence[int]], pattern: Sequence[int]) -> list[tuple[int, int]]:
    """(text, end) of every place where a pattern stands."""
    width = len(pattern)
    return [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(width, len(text) + 1)
        if list(text[end - width : end]) == list(pattern)
    ]


def counted(texts: Sequence[Sequence[int]], pattern: Sequence[int]) -> Counter[int]:
    """Counts of the tokens that follow a pattern."""
    return Counter(texts[number][end] for number, end in occurrences(texts, pattern) if end < len(texts[number]))


def naive(
    texts: Sequence[Sequence[int]], context: Sequence[int], most: int, *, depth: int, factor: float, floor: float
) -> tuple[tuple[int, ...], float]:
    """The rule of the paper, by counting: for each length of a match its greedy path; the largest sum wins."""
    best: tuple[tuple[int, ...], float] = ((), 0.0)
    for width in range(min(depth, len(context)), 0, -1):
        pattern = list(context[-width:])
        path: list[int] = []
        probability, score = 1.0, 0.0
        while len(path) < min(most, int(width * factor), depth - width):
            following = counted(texts, [*pattern, *path])
            if not following:
                break
            token_id = min(following, key=lambda each: (-following[each], each))
            probability *= following[token_id] / len(occurrences(texts, [*pattern, *path]))
            if probability < floor:
                break
            path.append(token_id)
            score += probability
        if score > best[1] + 1e-12:
            best = (tuple(path), score)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_counting_while_several_texts_grow_in_turn(seed: int) -> None:
    draw = random.Random(seed)
    automaton = SuffixAutomaton()
    texts: list[list[int]] = [[], [], []]
    places = [ROOT] * 3
    for _ in range(120):
        which = draw.randrange(3)
        token_id = draw.randrange(3)
        texts[which].append(token_id)
        places[which] = automaton.append(places[which], token_id)
    assert automaton.num_states <= 2 * automaton.num_tokens + 1
    for _ in range(60):
        pattern = [draw.randrange(3) for _ in range(draw.randint(1, 7))]
        state, length = automaton.longest_match(pattern)
        assert length == max(
            width for width in range(len(pattern) + 1) if not width or occurrences(texts, pattern[-width:])
        )
        if length:
            matched = pattern[-length:]
            assert automaton.count(state) == len(occurrences(texts, matched))
            following = counted(texts, matched)
            found = automaton.likeliest(state)
            assert (found is None) == (not following)
            if found is not None:
                assert found[0] == min(following, key=lambda each: (-following[each], each))
                assert automaton.count(found[1]) == following[found[0]]


@pytest.mark.parametrize("seed", range(6))
def test_proposals_are_those_of_the_papers_rule(seed: int) -> None:
    draw = random.Random(seed)
    rule = {"depth": draw.choice([6, 24]), "factor": draw.choice([0.5, 1.0, 2.0]), "floor": draw.choice([0.05, 0.4])}
    proposer = SuffixProposer(
        max_tree_depth=int(rule["depth"]),
        max_spec_factor=rule["factor"],
        min_token_prob=rule["floor"],
        max_cached_tokens=0,
    )
    request = ProposalRequest(OPEN, [draw.randrange(3) for _ in range(10)])
    assert isinstance(request.token_ids, list)
    num_proposed = 0
    for _ in range(30):
        request.num_tokens = draw.randint(0, 8)
        (found,) = proposer.propose([request])
        expected, _ = naive(
            [request.token_ids],
            request.token_ids,
            request.num_tokens,
            depth=int(rule["depth"]),
            factor=rule["factor"],
            floor=rule["floor"],
        )
        assert tuple(found.token_ids) == expected
        num_proposed += len(expected)
        request.token_ids += [draw.randrange(3) for _ in range(draw.randint(1, 4))]
    assert num_proposed


def ask(proposer: SuffixProposer, prompt: list[int], output: list[int], opened: Open = OPEN) -> list[int]:
    request = ProposalRequest(replace(opened, prompt_length=len(prompt)), [*prompt, *output], num_tokens=4)
    (found,) = proposer.propose([request])
    return list(found.token_ids)


def test_outputs_of_other_requests_are_found_and_prompts_are_not() -> None:
    proposer = SuffixProposer()
    ask(proposer, [40, 41, 42, 43, 44, 45], [1, 2, 3, 4, 5, 6, 7, 8])
    assert ask(proposer, [9, 1, 2, 3], []) == [4, 5, 6]  # no more than were matched
    assert ask(proposer, [40, 41, 42], []) == []


@pytest.mark.parametrize("rule", JudgingRule)
def test_others_outputs_are_drafted_only_where_the_output_does_not_depend_on_drafts(rule: JudgingRule) -> None:
    proposer = SuffixProposer()
    opened = replace(OPEN, judging_rule=rule)
    ask(proposer, [30], [1, 2, 3, 4, 5, 6], opened)
    is_free = rule in (JudgingRule.GREEDY, JudgingRule.COUPLED)
    assert ask(proposer, [9, 1, 2, 3], [], opened) == ([4, 5, 6] if is_free else [])


def test_outputs_are_not_shared_between_salts() -> None:
    proposer = SuffixProposer()
    ask(proposer, [30], [1, 2, 3, 4, 5, 6], replace(OPEN, cache_salt="a"))
    assert ask(proposer, [9, 1, 2, 3], [], replace(OPEN, cache_salt="b")) == []
    assert ask(proposer, [9, 1, 2, 3], [], replace(OPEN, cache_salt="a")) == [4, 5, 6]


def test_without_a_cache_only_the_own_text_is_looked_at() -> None:
    proposer = SuffixProposer(max_cached_tokens=0)
    ask(proposer, [30], [1, 2, 3, 4, 5, 6])
    assert ask(proposer, [9, 1, 2, 3], []) == []
    assert ask(proposer, [1, 2, 3, 4, 9, 1, 2, 3], []) == [4, 9, 1]


def test_how_sure_the_statistics_are_sets_the_length() -> None:
    proposer = SuffixProposer(max_cached_tokens=0, min_token_prob=0.5)
    certain = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert ask(proposer, certain, []) == [4, 5, 6]
    torn = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 6, 9, 1, 2, 3]
    assert ask(proposer, torn, []) == []


def test_the_cache_holds_the_newest_outputs_and_no_more_than_it_may() -> None:
    cache = OutputCache(100)
    place = None
    for token_id in range(1000):
        place = cache.append(place, token_id)
        assert cache.num_tokens <= 100
    assert cache.younger.longest_match([997, 998, 999])[1] == 3
    assert cache.younger.longest_match([10])[1] == cache.older.longest_match([10])[1] == 0


def test_salts_share_the_room_and_the_one_used_longest_ago_goes() -> None:
    proposer = SuffixProposer(max_cached_tokens=64)
    for salt in "abc":
        ask(proposer, [49], [1, 2, 3, 4, 5] * 6, replace(OPEN, cache_salt=salt))
    outputs = proposer.outputs
    assert outputs is not None
    assert outputs.of("c").num_tokens == 30
    assert outputs.num_tokens <= 64
    assert ask(proposer, [9, 2, 3, 4], [], replace(OPEN, cache_salt="a")) == []


def test_a_text_that_is_another_is_begun_anew() -> None:
    proposer = SuffixProposer(max_cached_tokens=0)
    request = ProposalRequest(OPEN, [1, 2, 3, 4, 9, 1, 2, 3], num_tokens=4)
    proposer.propose([request])
    request.token_ids = [5, 6, 7, 8, 9, 5, 6]
    (found,) = proposer.propose([request])
    assert list(found.token_ids) == [7, 8]
