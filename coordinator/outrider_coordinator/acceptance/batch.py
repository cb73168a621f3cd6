"""Checks and verdicts for all proposals or scores of a message.

Sparse rejection is judged with array operations over many proposals (``vectorized``, ``joint_verdicts``), the other
rules and block verification one by one; the results are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import OutriderError
from outrider.types import Evidence, JudgingRule, ScoreForm, SparseEvidence, SparseScores
from outrider.values import step_value
from outrider_coordinator.acceptance.evidence import EvidenceError, check_proposal
from outrider_coordinator.acceptance.joint_verdicts import ScoredCase, judge_together
from outrider_coordinator.acceptance.rules import JudgeRules, judge_one
from outrider_coordinator.acceptance.vectorized import FEWEST, ProposalCase, are_sound
from outrider_coordinator.acceptance.verdict import Verdict


@step_value(frozen=True, slots=True)
class ProposedDraft:
    """A proposal that has arrived, to be checked."""

    rules: JudgeRules
    draft_token_ids: tuple[int, ...]
    evidence: Evidence
    draft_length: int
    """Tokens that were asked for."""


@step_value(frozen=True, slots=True)
class ScoredDraft:
    """A checked proposal, possibly empty, and its scores, to be judged."""

    rules: JudgeRules
    draft_token_ids: tuple[int, ...]
    evidence: Evidence
    scores: ScoreForm
    seed: int
    base: int
    """Committed tokens that the proposal builds on."""


def check_proposals(batch: Sequence[ProposedDraft]) -> list[str]:
    """For each proposal the reason why it cannot be judged, in order; empty if it can."""
    if len(batch) < FEWEST:
        return list(map(_fault_of, batch))
    cases = {index: case for index, one in enumerate(batch) if (case := _sparse_proposal(one)) is not None}
    sound = cases if are_sound(list(cases.values())) else {}
    return ["" if index in sound else _fault_of(one) for index, one in enumerate(batch)]


def _sparse_proposal(one: ProposedDraft) -> ProposalCase | None:
    if one.rules.rule is not JudgingRule.REJECTION or not isinstance(one.evidence, SparseEvidence):
        return None
    if not 0 < len(one.draft_token_ids) <= one.draft_length:
        return None
    return ProposalCase(one.draft_token_ids, one.evidence, one.rules.num_token_ids)


def _fault_of(one: ProposedDraft) -> str:
    rules = one.rules
    try:
        check_proposal(
            one.draft_token_ids,
            one.evidence,
            expects=rules.evidence_form,
            asked=one.draft_length,
            num_token_ids=rules.num_token_ids,
        )
    except EvidenceError as error:
        return str(error)
    return ""


def judge(batch: Sequence[ScoredDraft]) -> list[Verdict | OutriderError]:
    """The verdict on each proposal, in order; a ``ProtocolError`` if the scores do not answer it."""
    if len(batch) < FEWEST:
        return list(map(_verdict_on, batch))
    cases = {index: case for index, one in enumerate(batch) if (case := _sparse_scores(one)) is not None}
    together = dict(zip(cases, judge_together(list(cases.values())) or (), strict=False))
    return [together.get(index) or _verdict_on(one) for index, one in enumerate(batch)]


def _sparse_scores(one: ScoredDraft) -> ScoredCase | None:
    if one.rules.rule is not JudgingRule.REJECTION or one.rules.verifies_blocks or not one.draft_token_ids:
        return None
    if not isinstance(one.evidence, SparseEvidence) or not isinstance(one.scores, SparseScores):
        return None
    proposal = ProposalCase(one.draft_token_ids, one.evidence, one.rules.num_token_ids)
    return ScoredCase(proposal, one.scores, one.seed, one.base)


def _verdict_on(one: ScoredDraft) -> Verdict | OutriderError:
    try:
        return judge_one(one.rules, one.draft_token_ids, one.evidence, one.scores, seed=one.seed, base=one.base)
    except OutriderError as error:
        return error
