"""How many tokens are drafted: by request, by load and by expected throughput."""

from outrider_coordinator.speculation.controller import ControlledSession, DraftLengthController, Mode
from outrider_coordinator.speculation.policy import LONGEST_INLINE_FEED, DraftLengthPolicy

__all__ = ["LONGEST_INLINE_FEED", "ControlledSession", "DraftLengthController", "DraftLengthPolicy", "Mode"]
