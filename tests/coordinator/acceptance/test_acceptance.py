"""The acceptance rules on numbers worked by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.errors import ProtocolError
from outrider.randomness.philox_numpy import gumbel
from outrider.randomness.streams import Stream
from outrider.types import (
    AcceptanceMethod,
    JudgingRule,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider_coordinator.acceptance import JudgeRules, Verdict, judge_one, judging_rule
from outrider_coordinator.acceptance.rejection import coin, draw, judge_rejection
from outrider_coordinator.acceptance.rules import judge_typical

TARGET = (0.5, 0.3, 0.2)
DRAFT = (0.2, 0.2, 0.6)


def sparse_evidence(*rows: dict[int, float]) -> SparseEvidence:
    return SparseEvidence(
        np.array([len(row) for row in rows], dtype=np.int32),
        np.array([token for row in rows for token in row], dtype=np.int32),
        np.array([prob for row in rows for prob in row.values()], dtype=np.float32),
    )


def sparse_scores(inside: Sequence[float], outside: Sequence[float], drawn: Sequence[int]) -> SparseScores:
    return SparseScores(
        np.array(inside, dtype=np.float32), np.array(outside, dtype=np.float32), np.array(drawn, dtype=np.int32)
    )


def drafts_of(probs: Sequence[float], *, count: int, base: int, length: int) -> list[tuple[int, ...]]:
    """Proposals of seeds 0 to ``count`` - 1, drawn as the draft draws them."""
    seeds, positions = np.arange(count)[:, None, None], np.arange(base, base + length)[None, :, None]
    noise = gumbel(seeds, Stream.PROPOSAL, base, positions, np.arange(len(probs)))
    return [tuple(row) for row in (np.log(np.array(probs)) + noise).argmax(axis=2).tolist()]


def judge_worked_example(drafted: tuple[int, ...], seed: int) -> Verdict:
    evidence = sparse_evidence(dict(enumerate(DRAFT)))
    return judge_rejection(drafted, evidence, sparse_scores(TARGET, [0.0, 1.0], [-1, 0]), seed=seed, base=1)


def test_the_worked_example() -> None:
    """Target (.5, .3, .2), draft (.2, .2, .6): acceptance .6, residual (.75, .25, 0), output (.5, .3, .2)."""
    count = 8_000
    drafts = drafts_of(DRAFT, count=count, base=1, length=1)
    verdicts = [judge_worked_example(drafted, seed) for seed, drafted in enumerate(drafts)]
    recovered = Counter(verdict.next_token_id for verdict in verdicts if not verdict.num_accepted)
    accepted = Counter(drafted[0] for verdict, drafted in zip(verdicts, drafts, strict=True) if verdict.num_accepted)
    assert accepted.total() / count == pytest.approx(0.6, abs=0.02)
    assert recovered[0] / recovered.total() == pytest.approx(0.75, abs=0.03)
    assert recovered[1] / recovered.total() == pytest.approx(0.25, abs=0.03)
    assert recovered[2] == 0
    for token, prob in enumerate(TARGET):
        assert (accepted[token] + recovered[token]) / count == pytest.approx(prob, abs=0.02)


def test_tokens_a_step_at_acceptance_point_eight() -> None:
    """(1 - a^(k+1)) / (1 - a): a = .8, k = 3 gives 2.952."""
    evidence = sparse_evidence(*[{0: 0.2, 1: 0.8}] * 3)
    scores = sparse_scores((0.4, 0.6) * 3, [0, 0, 0, 1], [-1, -1, -1, 0])  # acceptance: 0.2 + 0.6
    drafts = drafts_of((0.2, 0.8), count=5_000, base=5, length=3)
    gained = [
        1 + judge_rejection(drafted, evidence, scores, seed=seed, base=5).num_accepted
        for seed, drafted in enumerate(drafts)
    ]
    assert np.mean(gained) == pytest.approx(2.952, abs=0.06)


def _is_float32(value: float) -> bool:
    return float(np.float32(value)) == value


def test_the_comparison_is_strict() -> None:
    """A coin equal to the ratio rejects; a ratio one step above the coin accepts."""
    base = 10
    seed = next(seed for seed in range(10_000) if _is_float32(coin(seed, base, base)))
    equal = coin(seed, base, base) / 2  # over a draft probability of a half
    above = float(np.nextafter(np.float32(equal), np.float32(1)))
    for prob, accepted in ((equal, 0), (above, 1)):
        evidence = sparse_evidence({0: 0.5, 2: 0.5})
        scores = sparse_scores([prob, 0], [1 - prob, 1], [1, 0])
        assert judge_rejection((0,), evidence, scores, seed=seed, base=base).num_accepted == accepted


def test_a_target_without_the_token_always_rejects() -> None:
    evidence = sparse_evidence({0: 1.0})
    for seed in range(50):
        verdict = judge_rejection((0,), evidence, sparse_scores([0.0], [1.0, 1.0], [7, 3]), seed=seed, base=0)
        assert verdict == Verdict(0, 7)


def test_outside_is_chosen_by_its_mass_and_means_the_token_drawn_there() -> None:
    """Residual inside .1 (id 1), outside .3 (drawn: 9): a quarter and three quarters."""
    evidence = sparse_evidence({0: 0.8, 1: 0.2})
    scores = sparse_scores([0.4, 0.3], [0.3, 1.0], [9, 5])
    verdicts = [judge_rejection((0,), evidence, scores, seed=seed, base=4) for seed in range(3_000)]
    recovered = Counter(v.next_token_id for v in verdicts if not v.num_accepted)
    assert set(recovered) == {1, 9}
    assert recovered[9] / recovered.total() == pytest.approx(0.75, abs=0.05)


def test_an_empty_residual_accepts_where_the_coin_rejects() -> None:
    evidence = sparse_evidence({4: 1.0})
    scores = sparse_scores([0.5], [0.0, 1.0], [-1, 6])  # half of the mass is nowhere: only rounding does this, less
    rejecting = next(seed for seed in range(100) if coin(seed, 2, 2) > 0.5)
    assert judge_rejection((4,), evidence, scores, seed=rejecting, base=2) == Verdict(1, 6)


@pytest.mark.parametrize("rule", [JudgingRule.REJECTION, JudgingRule.COUPLED, JudgingRule.TYPICAL])
def test_no_draft_tokens_give_the_bonus(rule: JudgingRule) -> None:
    no_probs, no_ids = np.empty(0, np.float32), np.empty(0, np.int32)
    forms: dict[JudgingRule, ScoreForm] = {
        JudgingRule.REJECTION: sparse_scores([], [1.0], [2]),
        JudgingRule.COUPLED: TokenScores((2,)),
        JudgingRule.TYPICAL: TypicalScores(no_probs, no_probs, no_ids, 2),
    }
    assert judge_one(JudgeRules(rule, 3), (), None, forms[rule], seed=0, base=1) == Verdict(0, 2)


def test_greedy_and_coupled_keep_tokens_while_they_agree() -> None:
    rules = JudgeRules(JudgingRule.COUPLED, 10)
    own = TokenScores((1, 2, 3, 4))
    assert judge_one(rules, (1, 2, 3), None, own, seed=0, base=0) == Verdict(3, 4)
    assert judge_one(rules, (1, 5, 3), None, own, seed=0, base=0) == Verdict(1, 2)
    assert judge_one(rules, (9, 2, 3), None, own, seed=0, base=0) == Verdict(0, 1)


@pytest.mark.parametrize("method", AcceptanceMethod)
def test_temperature_0_is_greedy_under_every_method(method: AcceptanceMethod) -> None:
    assert judging_rule(method, temperature=0) is JudgingRule.GREEDY


def typical_scores(probs: Sequence[float], entropies: Sequence[float]) -> TypicalScores:
    count = len(probs)
    return TypicalScores(
        np.array(probs, np.float32), np.array(entropies, np.float32), np.arange(100, 100 + count, dtype=np.int32), 7
    )


def test_typical_follows_the_formula_position_by_position() -> None:
    entropies = (0.1, 1.2039728, 3.0, 2.0)  # exp(-1.2039728) = 0.3: the bounds meet at alpha .3
    for index, entropy in enumerate(entropies):
        bound = min(0.09, 0.3 * math.exp(-entropy))
        for prob, kept in ((bound * 1.001, True), (bound * 0.999, False)):
            probs = [1.0] * 4
            probs[index] = prob
            verdict = judge_typical(typical_scores(probs, entropies), threshold=0.09, alpha=0.3)
            expected = Verdict(4, 7) if kept else Verdict(index, 100 + index)
            assert verdict == expected


def test_typical_at_the_bound_itself_rejects() -> None:
    half = typical_scores([0.5], [0.0])
    assert judge_typical(half, threshold=0.5, alpha=1.0).num_accepted == 0
    assert judge_typical(half, threshold=0.49, alpha=1.0).num_accepted == 1


def test_typical_takes_its_parameters_from_the_rules() -> None:
    rule = judging_rule(AcceptanceMethod.TYPICAL, temperature=1)
    rules = JudgeRules(rule, 200, posterior_threshold=0.9, posterior_alpha=1.0)
    assert judge_one(rules, (1,), None, typical_scores([0.5], [0.0]), seed=0, base=0).num_accepted == 0
    assert judge_one(
        JudgeRules(JudgingRule.TYPICAL, 200), (1,), None, typical_scores([0.5], [0.0]), seed=0, base=0
    ).num_accepted


def test_a_draw_never_takes_a_weight_of_0() -> None:
    weights = np.array([0.0, 1e-30, 0.0, 0.0])
    assert {draw(seed, 0, 0, weights) for seed in range(200)} == {1}


def test_draws_depend_on_seed_base_and_position_alone() -> None:
    keys = [(seed, base, position) for seed in (1, 2**63) for base in (4, 5) for position in (5, 6)]
    coins = [coin(*key) for key in keys]
    assert len(set(coins)) == len(keys)
    assert coins == [coin(*key) for key in keys]


@pytest.mark.parametrize(
    ("rule", "scores"),
    [
        (JudgingRule.COUPLED, sparse_scores([], [1.0], [2])),
        (JudgingRule.COUPLED, TokenScores((1, 2))),
        (JudgingRule.COUPLED, TokenScores((10,))),
        (JudgingRule.COUPLED, TokenScores((-1,))),
        (JudgingRule.REJECTION, TokenScores((1,))),
        (JudgingRule.REJECTION, sparse_scores([], [1.0], [-1])),
        (JudgingRule.REJECTION, sparse_scores([], [1.0], [10])),
        (JudgingRule.REJECTION, sparse_scores([], [0.5], [1])),
        (JudgingRule.REJECTION, sparse_scores([], [math.nan], [1])),
        (JudgingRule.REJECTION, sparse_scores([0.1], [0.9], [1])),
        (JudgingRule.REJECTION, sparse_scores([], [0.5, 0.5], [1, 1])),
        (
            JudgingRule.TYPICAL,
            TypicalScores(np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32), 0),
        ),
        (
            JudgingRule.TYPICAL,
            TypicalScores(np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.int32), 10),
        ),
    ],
)
def test_scores_that_do_not_answer_the_proposal_are_refused(rule: JudgingRule, scores: ScoreForm) -> None:
    with pytest.raises(ProtocolError):
        judge_one(JudgeRules(rule, 10), (), None, scores, seed=0, base=0)


def test_scores_with_mass_outside_and_no_token_drawn_there_are_refused() -> None:
    evidence = sparse_evidence({0: 1.0})
    scores = sparse_scores([0.5], [0.5, 1], [-1, 1])
    with pytest.raises(ProtocolError):
        judge_one(JudgeRules(JudgingRule.REJECTION, 5), (0,), evidence, scores, seed=0, base=0)


def test_a_draw_that_rounds_up_to_the_whole_sum_takes_the_last_weight_above_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.randomness.scalar.coin", lambda *_: 1.0)
    assert draw(1, 2, 3, np.array([0.25, 0.5, 0.0])) == 1
