"""How many tokens are drafted: by request, by load and by expected throughput."""

from coordinator.speculation.controller import ControlledSession, DraftLengthController, Mode
from coordinator.speculation.policy import LONGEST_INLINE_FEED, DraftLengthPolicy

__all__ = ["LONGEST_INLINE_FEED", "ControlledSession", "DraftLengthController", "DraftLengthPolicy", "Mode"]
