"""Chat templates: found among a model's tokenizer files, rendered in a sandbox.

Prompts equal those of transformers' ``apply_chat_template``; neither transformers nor torch is imported.
"""

from outrider.tokenization.chat.renderer import ChatRenderer

__all__ = ["ChatRenderer"]
