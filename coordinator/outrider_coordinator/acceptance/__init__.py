"""Acceptance rules: pure functions of a proposal, scores and a seed.

Owns exactness. Independent of sessions, links and text.
"""

from outrider_coordinator.acceptance.evidence import EvidenceError, check_proposal
from outrider_coordinator.acceptance.rules import JudgeRules, judge_one, judging_rule
from outrider_coordinator.acceptance.verdict import NextToken, Verdict

__all__ = [
    "EvidenceError",
    "JudgeRules",
    "NextToken",
    "Verdict",
    "check_proposal",
    "judge_one",
    "judging_rule",
]
