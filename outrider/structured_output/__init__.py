"""Structured output: grammars that the output of a model has to match, compiled and followed token by token.

A grammar is a JSON schema, a regular expression, a choice of texts or a Lark or GBNF grammar. ``GrammarCompiler``
compiles it for a tokenizer, and a ``Matcher`` tells which tokens may come next. ``MaskThreads`` make the
``PositionMasks`` of a forward while it runs. Uses llguidance; requires no torch.
"""

from outrider.structured_output.compiler import GrammarCompiler
from outrider.structured_output.embedding import embedded_grammar
from outrider.structured_output.matcher import Matcher, Outcome
from outrider.structured_output.position_masks import MaskThreads, PositionMasks, joined_words, made_within
from outrider.structured_output.schemas import embedded_schema, with_path
from outrider.structured_output.trial import may_take_long

__all__ = [
    "GrammarCompiler",
    "MaskThreads",
    "Matcher",
    "Outcome",
    "PositionMasks",
    "embedded_grammar",
    "embedded_schema",
    "joined_words",
    "made_within",
    "may_take_long",
    "with_path",
]
