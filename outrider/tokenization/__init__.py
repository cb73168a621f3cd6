"""Tokenization: a model's tokenizer, texts of single tokens, chat templates, sampling defaults.

Reads the files of a target's description. Used by the coordinator and the HTTP gateway; requires neither torch nor a
transport.
"""

from outrider.tokenization.model_text import ModelText, read_chat_template
from outrider.tokenization.token_texts import TokenText, TokenTexts
from outrider.tokenization.tokenizer import REPLACEMENT, LoneToken, TextTokenizer, TokenKind

__all__ = [
    "REPLACEMENT",
    "LoneToken",
    "ModelText",
    "TextTokenizer",
    "TokenKind",
    "TokenText",
    "TokenTexts",
    "read_chat_template",
]
