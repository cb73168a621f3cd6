"""The rules by which draft tokens are kept: pure functions of a proposal, scores and a seed.

Owns exactness. Knows no sessions, no links and no text.
"""

from coordinator.acceptance.evidence import EvidenceError, check_proposal
from coordinator.acceptance.rules import JudgeRules, Rule, judge
from coordinator.acceptance.verdict import NextToken, Verdict

__all__ = ["EvidenceError", "JudgeRules", "NextToken", "Rule", "Verdict", "check_proposal", "judge"]
