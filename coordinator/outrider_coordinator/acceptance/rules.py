"""Acceptance rules by request: from a request to its rule, and from a rule to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from outrider.types import (
    AcceptanceMethod,
    Evidence,
    JudgingRule,
    ScoreForm,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider_coordinator.acceptance.block_verification import judge_block
from outrider_coordinator.acceptance.coupled import judge_coupled
from outrider_coordinator.acceptance.evidence import Verdict, check_scores
from outrider_coordinator.acceptance.rejection import judge_rejection
from outrider_coordinator.acceptance.typical import judge_typical


def judging_rule(method: AcceptanceMethod, *, temperature: float) -> JudgingRule:
    """Judging rule of a request; temperature 0 is greedy with every method. The only place that derives it."""
    if temperature == 0:
        return JudgingRule.GREEDY
    if method is AcceptanceMethod.COUPLED:
        return JudgingRule.COUPLED
    if method is AcceptanceMethod.TYPICAL:
        return JudgingRule.TYPICAL
    return JudgingRule.REJECTION


_SCORES: dict[JudgingRule, type] = {
    JudgingRule.GREEDY: TokenScores,
    JudgingRule.COUPLED: TokenScores,
    JudgingRule.REJECTION: SparseScores,
    JudgingRule.TYPICAL: TypicalScores,
}


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """Parameters for judging a request, without its seed."""

    rule: JudgingRule
    num_token_ids: int
    """Ids the target may draw are below this."""
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    verifies_blocks: bool = False
    """Rejection: whether the draft tokens of a step are judged together."""

    @property
    def is_of_target_alone(self) -> bool:
        """True if no draft can change the output, whatever it proposes."""
        return self.rule in (JudgingRule.GREEDY, JudgingRule.COUPLED)


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
        judge = judge_block if rules.verifies_blocks else judge_rejection
        return judge(draft_token_ids, evidence, cast(SparseScores, scores), seed=seed, base=base)
    return judge_typical(cast(TypicalScores, scores), threshold=rules.posterior_threshold, alpha=rules.posterior_alpha)
