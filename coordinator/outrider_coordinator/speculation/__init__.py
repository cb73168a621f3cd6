"""Draft length policy: by request, by load and by expected throughput."""

from outrider_coordinator.speculation.controller import LONGEST_PROMPT_AT_ONCE, DraftLengthController
from outrider_coordinator.speculation.draft_prefill import LONGEST_INLINE_FEED
from outrider_coordinator.speculation.policy import DraftLengthPolicy
from outrider_coordinator.speculation.sessions import ControlledSession, Mode

__all__ = [
    "LONGEST_INLINE_FEED",
    "LONGEST_PROMPT_AT_ONCE",
    "ControlledSession",
    "DraftLengthController",
    "DraftLengthPolicy",
    "Mode",
]
