"""Text of a generation: from ids to text as they come, and texts that stop it.

Knows nothing of sessions and steps. ``tokenizers`` is the only library it stands on.
"""

from outrider_coordinator.text.detokenize import Detokenizer
from outrider_coordinator.text.stops import StopMatcher

__all__ = ["Detokenizer", "StopMatcher"]
