"""Text: from a prompt to ids, from ids to text as they come, and texts that stop a generation.

Knows nothing of sessions and steps. ``tokenizers`` is the only library it stands on.
"""

from outrider_coordinator.text.detokenize import Detokenizer
from outrider_coordinator.text.stops import StopMatcher
from outrider_coordinator.text.tokenizer import TextTokenizer

__all__ = ["Detokenizer", "StopMatcher", "TextTokenizer"]
