"""Structured output: grammars that the output of a model has to match, compiled and followed token by token.

A grammar is a JSON schema, a regular expression, a choice of texts or a Lark or GBNF grammar. ``GrammarCompiler``
compiles it for a tokenizer, and a ``Matcher`` tells which tokens may come next. Uses llguidance; requires no torch.
"""

from outrider.structured_output.compiler import GrammarCompiler
from outrider.structured_output.matcher import Matcher, Outcome

__all__ = ["GrammarCompiler", "Matcher", "Outcome"]
