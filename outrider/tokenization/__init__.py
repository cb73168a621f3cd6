"""Text and token ids: the tokenizer of a model's files, texts of single tokens, chat templates, sampling defaults.

Reads the files that a target describes itself with. Shared by the coordinator and the HTTP gateway; knows no torch, no
transport and no session.
"""

from outrider.tokenization.model_text import ModelText
from outrider.tokenization.token_texts import TokenText, TokenTexts
from outrider.tokenization.tokenizer import TextTokenizer

__all__ = ["ModelText", "TextTokenizer", "TokenText", "TokenTexts"]
