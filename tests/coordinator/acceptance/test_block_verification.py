"""Block verification: the target's joint distribution exactly, and never fewer tokens than one after the other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.types import AcceptanceMethod, JudgingRule, SparseEvidence, SparseScores
from outrider_coordinator.acceptance import JudgeRules, Verdict, judge_one
from outrider_coordinator.acceptance.block_verification import (
    judge_block,
    keeping,
    rhos_of,
    sparse_ratios,
    sparse_residuals,
)
from outrider_coordinator.acceptance.rejection import judge_rejection
from tests.coordinator.acceptance import test_joint_distribution as joint
from tests.coordinator.blocks import BlockDraft, LookupDraft
from tests.coordinator.driving import make_plan

Doubles = NDArray[np.float64]
V = 4


@dataclass(frozen=True)
class Pair:
    """A draft and a target over ``length`` positions, each with a distribution for every text before it."""

    length: int
    draft: dict[tuple[int, ...], Doubles]
    target: dict[tuple[int, ...], Doubles]

    @classmethod
    def random(cls, seed: int, *, length: int, sharpness: float, support: int = V, closeness: float = 0.5) -> Pair:
        """``support`` tokens that the draft draws from at most."""
        random = np.random.default_rng(seed)
        draft, target = {}, {}
        for count in range(length + 1):
            for text in itertools.product(range(V), repeat=count):
                own = random.dirichlet(np.full(V, 1 / sharpness))
                target[text] = closeness * own + (1 - closeness) * random.dirichlet(np.full(V, 1 / sharpness))
                cut = np.where(np.argsort(np.argsort(-own)) < support, own, 0.0) + 0.0
                draft[text] = cut / cut.sum()
        return cls(length, draft, target)

    def proposals(self) -> list[tuple[tuple[int, ...], float]]:
        """Every proposal that may be drawn, and its probability."""
        found = []
        for tokens in itertools.product(range(V), repeat=self.length):
            prob = float(np.prod([self.draft[tokens[:i]][token] for i, token in enumerate(tokens)]))
            if prob > 0:
                found.append((tokens, prob))
        return found

    def evidence(self, tokens: tuple[int, ...]) -> SparseEvidence:
        rows = [self.draft[tokens[:i]] for i in range(self.length)]
        ids = [np.flatnonzero(row) for row in rows]
        return SparseEvidence(
            np.array([len(own) for own in ids], dtype=np.int32),
            np.concatenate(ids).astype(np.int32),
            np.concatenate([row[own] for row, own in zip(rows, ids, strict=True)]).astype(np.float32),
        )

    def scores(self, tokens: tuple[int, ...], outside: list[int]) -> SparseScores:
        """Scores with ``outside`` drawn outside the support at each position, the bonus the last."""
        rows = [self.target[tokens[:i]] for i in range(self.length)]
        inside = [self.draft[tokens[:i]] > 0 for i in range(self.length)]
        masses = [float(row[~own].sum()) for row, own in zip(rows, inside, strict=True)]
        return SparseScores(
            np.concatenate([row[own] for row, own in zip(rows, inside, strict=True)]).astype(np.float32),
            np.array([*masses, 1.0], dtype=np.float32),
            np.array(outside, dtype=np.int32),
        )


def block_lengths(pair: Pair, tokens: tuple[int, ...]) -> Doubles:
    """Probability that each number of tokens from 0 to K is kept."""
    evidence, scores = pair.evidence(tokens), pair.scores(tokens, [0] * (pair.length + 1))
    rhos, residual_at = rhos_of(sparse_ratios(tokens, evidence, scores)), sparse_residuals(evidence, scores)
    left, found = 1.0, [0.0] * (pair.length + 1)
    for length in range(pair.length, 0, -1):
        found[length] = left * keeping(length, rhos, residual_at)
        left -= found[length]
    return np.array([left, *found[1:]])


def token_lengths(pair: Pair, tokens: tuple[int, ...]) -> Doubles:
    """The same, judged one after the other."""
    ratios = [min(1.0, pair.target[tokens[:i]][x] / pair.draft[tokens[:i]][x]) for i, x in enumerate(tokens)]
    reached = np.cumprod([1.0, *ratios])
    return np.append(reached[:-1] - reached[1:], reached[-1])


PAIRS = [
    Pair.random(seed, length=length, sharpness=sharpness, support=support, closeness=closeness)
    for seed, (length, sharpness, support, closeness) in enumerate(
        itertools.product((1, 2, 3, 4), (0.3, 1.0, 4.0), (1, 2, V), (0.0, 0.5, 0.95))
    )
]


def test_no_random_pair_keeps_fewer_tokens_than_one_after_the_other() -> None:
    gained = []
    for pair in PAIRS:
        counts = np.arange(pair.length + 1)
        block, token = (
            sum(prob * float(lengths(pair, tokens) @ counts) for tokens, prob in pair.proposals())
            for lengths in (block_lengths, token_lengths)
        )
        assert block >= token - 1e-6, (pair.length, block, token)
        gained.append(block - token)
        if pair.length == 1:
            assert block == pytest.approx(token, abs=1e-6)
    assert max(gained) > 0.03  # it does bring something


@pytest.mark.parametrize("pair", PAIRS[27:81:9], ids=lambda pair: str(pair.length))
def test_what_comes_out_has_the_targets_law_worked_out_exactly(pair: Pair) -> None:
    """Kept tokens, the next one and the target's own after it: every text of K + 1 tokens, without any draw."""
    distribution: dict[tuple[int, ...], float] = {}
    for tokens, prob in pair.proposals():
        evidence, scores = pair.evidence(tokens), pair.scores(tokens, [0] * (pair.length + 1))
        residual_at = sparse_residuals(evidence, scores)
        rhos = [1.0]
        for ratio in sparse_ratios(tokens, evidence, scores):
            rhos.append(min(1.0, rhos[-1] * ratio))
        for kept, share in enumerate(block_lengths(pair, tokens)):
            if share <= 1e-15:
                continue
            if kept == pair.length:
                following = pair.target[tokens]
            else:
                draft, target = pair.draft[tokens[:kept]], pair.target[tokens[:kept]]
                following = np.maximum(rhos[kept] * target - draft, 0.0)
                np.testing.assert_allclose(residual_at(kept, rhos[kept]).sum(), following.sum(), atol=1e-6)
                following = following / following.sum()
            for token, chance in enumerate(following):
                text = (*tokens[:kept], token)
                distribution[text] = distribution.get(text, 0.0) + prob * share * float(chance)
    for text in itertools.product(range(V), repeat=pair.length + 1):
        found = sum(
            distribution.get(text[:count], 0.0)
            * float(np.prod([pair.target[text[:i]][text[i]] for i in range(count, pair.length + 1)]))
            for count in range(1, pair.length + 2)
        )
        expected = float(np.prod([pair.target[text[:i]][token] for i, token in enumerate(text)]))
        assert found == pytest.approx(expected, abs=1e-6)


BLOCK = JudgeRules(JudgingRule.REJECTION, V, verifies_blocks=True)


@pytest.mark.parametrize(("seed", "tokens"), [(3, (0, 1, 2, 1)), (2, (2, 1, 3, 1))])
def test_verdicts_are_those_of_the_probabilities(seed: int, tokens: tuple[int, ...]) -> None:
    """Numbers of kept tokens, and after each the next token, which is of the residual."""
    pair = Pair.random(seed, length=4, sharpness=2.0)
    evidence, random = pair.evidence(tokens), np.random.default_rng(1)
    shares = np.zeros((5, V))
    for draw in range(2000):
        scores = pair.scores(tokens, [-1] * 4 + [int(random.integers(V))])
        verdict = judge_one(BLOCK, tokens, evidence, scores, seed=draw, base=7)
        shares[verdict.num_accepted, verdict.next_token_id] += 1 / 2000
    rho, following = 1.0, np.full((5, V), 1 / V)
    for kept, token in enumerate(tokens):
        draft, target = pair.draft[tokens[:kept]], pair.target[tokens[:kept]]
        following[kept] = np.maximum(rho * target - draft, 0.0)
        following[kept] /= max(following[kept].sum(), 1e-9)
        rho = min(1.0, rho * target[token] / draft[token])
    np.testing.assert_allclose(shares, block_lengths(pair, tokens)[:, None] * following, atol=0.04)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.length == 1][::3], ids=lambda pair: str(pair.length))
def test_a_block_of_one_token_is_judged_with_the_coin_and_the_draw_of_that_token(pair: Pair) -> None:
    for seed, (tokens, _) in enumerate(pair.proposals() * 20):
        evidence, scores = pair.evidence(tokens), pair.scores(tokens, [1, 2])
        alone = judge_rejection(tokens, evidence, scores, seed=seed, base=seed % 7)
        assert judge_block(tokens, evidence, scores, seed=seed, base=seed % 7) == alone


def test_equal_laws_keep_all_and_nothing_proposed_is_a_bonus() -> None:
    pair = Pair.random(5, length=3, sharpness=1.0)
    same = replace(pair, target={text: pair.draft.get(text, row) for text, row in pair.target.items()})
    tokens = (1, 2, 0)
    for seed in range(50):
        verdict = judge_one(
            BLOCK, tokens, same.evidence(tokens), same.scores(tokens, [-1, -1, -1, 2]), seed=seed, base=3
        )
        assert verdict == Verdict(3, 2)
    plain = SparseScores(np.empty(0, np.float32), np.ones(1, np.float32), np.array([3], np.int32))
    assert judge_one(BLOCK, (), None, plain, seed=0, base=1) == Verdict(0, 3)


DRAFTS: dict[str, Any] = {
    "good, support cut": BlockDraft(joint.GOOD, support=3),
    "reversed": BlockDraft(joint.BAD),
    "n-gram": LookupDraft(joint.LANGUAGE),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_blocks_follow_the_joint_distribution_through_the_real_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "make_plan", lambda **fields: _by_block(make_plan(**fields)))
    found = joint.p_value(DRAFTS[name], AcceptanceMethod.REJECTION, num_draws=joint.FEW_DRAWS)
    assert found > 1e-3


def _by_block(plan: Any) -> Any:
    return replace(plan, rules=replace(plan.rules, verifies_blocks=True))


def test_the_next_token_is_of_the_support_at_its_own_position() -> None:
    """The target agrees with the draft on the first token, and rules out the second."""
    counts, ids = np.array([2, 2], dtype=np.int32), np.array([1, 2, 3, 4], dtype=np.int32)
    evidence = SparseEvidence(counts, ids, np.full(4, 0.5, dtype=np.float32))
    inside, outside = np.array([0.5, 0.5, 0.0, 1.0], dtype=np.float32), np.array([0.0, 0.0, 1.0], dtype=np.float32)
    scores = SparseScores(inside, outside, np.array([-1, -1, 5], dtype=np.int32))
    for seed in range(20):
        assert judge_block((1, 3), evidence, scores, seed=seed, base=7) == Verdict(1, 4)
