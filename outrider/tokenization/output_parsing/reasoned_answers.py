"""Grammars of outputs that may begin with reasoning, before what has to match a schema.

Where the prompt opens the reasoning, it certainly comes first, and is free text (``Grammar.after``). Elsewhere the
model chooses: an output either opens it or begins with the answer.
"""

from __future__ import annotations

from outrider.tokenization.output_parsing.reasoning import THINK_CLOSE, THINK_OPEN
from outrider.tokenization.output_parsing.strict_calls import HEAD, TokenId, marker_of, text_until

_START = "\nstart: "
"""The rule alone: line ends in schemas are escaped."""
_CHANNELS = """start: (message <|end|> <|start|> "assistant")* <|channel|> "final" <|message|> answer
message: <|channel|> NAME <|message|> TEXT
NAME: "analysis" | "commentary"
"""


def channel_grammar(answer: str) -> str:
    """Grammar of an answer on the channel ``final``, after messages on others."""
    return f"{HEAD}{_CHANNELS}answer: {answer}\n"


def thinking_grammar(grammar: str, token_id: TokenId) -> str:
    """Grammar of outputs that may begin with a text between ``<think>`` and ``</think>``; ``grammar``: of the rest."""
    rest = grammar.replace(_START, "\nrest: ", 1)
    thinking = f"thinking: {marker_of(THINK_OPEN, token_id)} thought\n{text_until('thought', THINK_CLOSE, token_id)}"
    return f"{rest}start: (thinking BLANKS)? rest\nBLANKS: /[ \\t\\r\\n]*/\n{thinking}"
