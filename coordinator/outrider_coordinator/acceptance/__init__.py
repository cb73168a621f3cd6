"""Acceptance rules: pure functions of a proposal, scores and a seed.

Owns exactness. Independent of sessions, links and text.
"""

from outrider_coordinator.acceptance.evidence import Verdict, is_sound_proposal
from outrider_coordinator.acceptance.rules import JudgeRules, judge_one, judging_rule

__all__ = [
    "JudgeRules",
    "Verdict",
    "is_sound_proposal",
    "judge_one",
    "judging_rule",
]
