"""Chat templates: found among the tokenizer files of a model, rendered in a sandbox.

Prompts equal those of transformers' ``apply_chat_template``. Neither transformers nor torch is imported.
"""

from outrider.tokenization.chat.renderer import ChatRenderer
from outrider.tokenization.chat.rendering import ChatRendering

__all__ = ["ChatRenderer", "ChatRendering"]
