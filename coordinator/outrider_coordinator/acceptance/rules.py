"""From a request to its rule, and from a rule to a verdict."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from outrider.types import (
    AcceptanceMethod,
    DenseEvidence,
    DenseScores,
    Evidence,
    ScoreForm,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider_coordinator.acceptance.coupled import judge_coupled
from outrider_coordinator.acceptance.dense import judge_dense_rejection, judge_dense_typical
from outrider_coordinator.acceptance.evidence import check_scores
from outrider_coordinator.acceptance.rejection import judge_rejection
from outrider_coordinator.acceptance.typical import judge_typical
from outrider_coordinator.acceptance.verdict import Verdict


class Rule(enum.Enum):
    """How one session's proposals are judged."""

    SAME_TOKEN = "same token"  # greedy under every method, and coupled
    SPARSE_REJECTION = "sparse rejection"
    DENSE_REJECTION = "dense rejection"
    TYPICAL = "typical"
    DENSE_TYPICAL = "dense typical"


_EVIDENCE: dict[Rule, type | None] = {
    Rule.SAME_TOKEN: None,
    Rule.SPARSE_REJECTION: SparseEvidence,
    Rule.DENSE_REJECTION: DenseEvidence,
    Rule.TYPICAL: None,
    Rule.DENSE_TYPICAL: None,
}
_SCORES: dict[Rule, type] = {
    Rule.SAME_TOKEN: TokenScores,
    Rule.SPARSE_REJECTION: SparseScores,
    Rule.DENSE_REJECTION: DenseScores,
    Rule.TYPICAL: TypicalScores,
    Rule.DENSE_TYPICAL: DenseScores,
}


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """All that judging needs to know of a request, beside its seed."""

    rule: Rule
    num_token_ids: int
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

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
    ) -> JudgeRules:
        """The rules of a request; temperature 0 is greedy under every method."""
        if temperature == 0 or method is AcceptanceMethod.COUPLED:
            rule = Rule.SAME_TOKEN
        elif method is AcceptanceMethod.TYPICAL:
            rule = Rule.DENSE_TYPICAL if dense else Rule.TYPICAL
        else:
            rule = Rule.DENSE_REJECTION if dense else Rule.SPARSE_REJECTION
        return cls(rule, num_token_ids, posterior_threshold, posterior_alpha)

    @property
    def evidence_form(self) -> type | None:
        """The evidence a proposal must bring; None where none is needed."""
        return _EVIDENCE[self.rule]


def judge(
    rules: JudgeRules, draft_token_ids: Sequence[int], evidence: Evidence, scores: ScoreForm, *, seed: int, base: int
) -> Verdict:
    """The verdict on a proposal that ``check_proposal`` let through.

    ``base`` is the committed length the proposal builds on; draft token i stands at position ``base + i``. Raises
    ``ProtocolError`` for scores that do not answer the proposal.
    """
    rule = rules.rule
    check_scores(draft_token_ids, evidence, scores, expects=_SCORES[rule], num_token_ids=rules.num_token_ids)
    if rule is Rule.SAME_TOKEN:
        return judge_coupled(draft_token_ids, cast(TokenScores, scores))
    if rule is Rule.SPARSE_REJECTION:
        sparse = cast(SparseEvidence | None, evidence)
        return judge_rejection(draft_token_ids, sparse, cast(SparseScores, scores), seed=seed, base=base)
    bounds = {"threshold": rules.posterior_threshold, "alpha": rules.posterior_alpha}
    if rule is Rule.TYPICAL:
        return judge_typical(cast(TypicalScores, scores), **bounds)
    known = _known_columns(cast(DenseScores, scores), rules.num_token_ids)
    if rule is Rule.DENSE_TYPICAL:
        return judge_dense_typical(draft_token_ids, known, seed=seed, base=base, **bounds)
    return judge_dense_rejection(draft_token_ids, cast(DenseEvidence | None, evidence), known, seed=seed, base=base)


def _known_columns(scores: DenseScores, num_token_ids: int) -> DenseScores:
    return replace(scores, target_probs=scores.target_probs[:, :num_token_ids])
