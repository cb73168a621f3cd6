"""Acceptance rules by request: from a request to its rule, and from a rule to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from outrider.types import (
    AcceptanceMethod,
    DenseEvidence,
    DenseScores,
    Evidence,
    JudgingRule,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider_coordinator.acceptance.block_verification import judge_block, judge_dense_block
from outrider_coordinator.acceptance.coupled import judge_coupled
from outrider_coordinator.acceptance.dense import judge_dense_rejection, judge_dense_typical
from outrider_coordinator.acceptance.evidence import check_scores
from outrider_coordinator.acceptance.rejection import judge_rejection
from outrider_coordinator.acceptance.typical import judge_typical
from outrider_coordinator.acceptance.verdict import Verdict


def judging_rule(method: AcceptanceMethod, *, temperature: float, dense: bool = False) -> JudgingRule:
    """Judging rule of a request; temperature 0 is greedy with every method. The only place that derives it."""
    if temperature == 0:
        return JudgingRule.GREEDY
    if method is AcceptanceMethod.COUPLED:
        return JudgingRule.COUPLED
    if method is AcceptanceMethod.TYPICAL:
        return JudgingRule.DENSE_TYPICAL if dense else JudgingRule.TYPICAL
    return JudgingRule.DENSE_REJECTION if dense else JudgingRule.REJECTION


_EVIDENCE: dict[JudgingRule, type | None] = {
    JudgingRule.GREEDY: None,
    JudgingRule.COUPLED: None,
    JudgingRule.REJECTION: SparseEvidence,
    JudgingRule.DENSE_REJECTION: DenseEvidence,
    JudgingRule.TYPICAL: None,
    JudgingRule.DENSE_TYPICAL: None,
}
_SCORES: dict[JudgingRule, type] = {
    JudgingRule.GREEDY: TokenScores,
    JudgingRule.COUPLED: TokenScores,
    JudgingRule.REJECTION: SparseScores,
    JudgingRule.DENSE_REJECTION: DenseScores,
    JudgingRule.TYPICAL: TypicalScores,
    JudgingRule.DENSE_TYPICAL: DenseScores,
}


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """Parameters for judging a request, without its seed."""

    rule: JudgingRule
    num_token_ids: int
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    verifies_blocks: bool = False
    """Rejection: whether the draft tokens of a step are judged together."""

    @classmethod
    def of(
        cls,
        method: AcceptanceMethod,
        *,
        temperature: float,
        dense: bool,
        num_token_ids: int,
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
        verifies_blocks: bool = False,
    ) -> JudgeRules:
        """The rules of a request; temperature 0 is greedy under every method."""
        rule = judging_rule(method, temperature=temperature, dense=dense)
        return cls(rule, num_token_ids, posterior_threshold, posterior_alpha, verifies_blocks)

    @property
    def is_of_target_alone(self) -> bool:
        """True if no draft can change the output, whatever it proposes."""
        return self.rule in (JudgingRule.GREEDY, JudgingRule.COUPLED)

    @property
    def evidence_form(self) -> type | None:
        """The form of evidence that a proposal requires, if any."""
        return _EVIDENCE[self.rule]


def judge_one(
    rules: JudgeRules, draft_token_ids: Sequence[int], evidence: Evidence, scores: ScoreForm, *, seed: int, base: int
) -> Verdict:
    """The verdict on a proposal that ``is_sound_proposal`` let through.

    ``base`` is the committed length the proposal builds on; draft token i stands at position ``base + i``. Raises
    ``ProtocolError`` for scores that do not answer the proposal.
    """
    rule = rules.rule
    check_scores(draft_token_ids, evidence, scores, expects=_SCORES[rule], num_token_ids=rules.num_token_ids)
    if rule in (JudgingRule.GREEDY, JudgingRule.COUPLED):
        return judge_coupled(draft_token_ids, cast(TokenScores, scores))
    if rule is JudgingRule.REJECTION:
        sparse = cast(SparseEvidence | None, evidence)
        judge_sparse = judge_block if rules.verifies_blocks else judge_rejection
        return judge_sparse(draft_token_ids, sparse, cast(SparseScores, scores), seed=seed, base=base)
    bounds = {"threshold": rules.posterior_threshold, "alpha": rules.posterior_alpha}
    if rule is JudgingRule.TYPICAL:
        return judge_typical(cast(TypicalScores, scores), **bounds)
    known = _known_columns(cast(DenseScores, scores), rules.num_token_ids)
    if rule is JudgingRule.DENSE_TYPICAL:
        return judge_dense_typical(draft_token_ids, known, seed=seed, base=base, **bounds)
    judge_dense = judge_dense_block if rules.verifies_blocks else judge_dense_rejection
    return judge_dense(draft_token_ids, cast(DenseEvidence | None, evidence), known, seed=seed, base=base)


def _known_columns(scores: DenseScores, num_token_ids: int) -> DenseScores:
    return replace(scores, target_probs=scores.target_probs[:, :num_token_ids])
