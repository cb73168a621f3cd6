"""Acceptance rules by request: from a request to its rule, and from a rule to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

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
from outrider_coordinator.acceptance.evidence import Verdict, check_scores
from outrider_coordinator.acceptance.rejection import judge_rejection


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


def judge_coupled(draft_token_ids: Sequence[int], scores: TokenScores) -> Verdict:
    """Accept while draft and target agree; the target's own token is the next one.

    The output does not depend on the draft: it is the target's argmax at temperature 0, and otherwise its argmax with
    the seed's Gumbel noise.
    """
    own = scores.token_ids
    pairs = enumerate(zip(draft_token_ids, own, strict=False))
    accepted = next((index for index, (drafted, token_id) in pairs if drafted != token_id), len(draft_token_ids))
    return Verdict(accepted, own[accepted])


def judge_typical(scores: TypicalScores, *, threshold: float, alpha: float) -> Verdict:
    """Typical acceptance (Medusa), which is not exact.

    Accept while target(x) > min(threshold, alpha * exp(-entropy)); then emit the target's argmax, or the bonus.
    """
    bounds = np.minimum(threshold, alpha * np.exp(-scores.entropies.astype(np.float64)))  # [K]
    kept = scores.draft_token_probs > bounds
    accepted = int(np.append(kept, False).argmin())
    if accepted < kept.shape[0]:
        return Verdict(accepted, int(scores.argmax_token_ids[accepted]))
    return Verdict(accepted, scores.bonus_token_id)


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
