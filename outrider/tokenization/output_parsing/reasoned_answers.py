"""Grammars of outputs that may begin with reasoning, before what has to match a schema.

Where the prompt opens the reasoning, it certainly comes first, and is free text (``Grammar.after``). Elsewhere the
model chooses: an output either opens it or begins with the answer.
"""

from __future__ import annotations

import json

from outrider.tokenization.output_parsing.reasoning import THINK_CLOSE, THINK_OPEN
from outrider.tokenization.output_parsing.strict_calls import HEAD, TokenId, special

_START = "start: "
_CHANNELS = """start: (message <|end|> <|start|> "assistant")* <|channel|> "final" <|message|> answer
message: <|channel|> NAME <|message|> TEXT
NAME: "analysis" | "commentary"
"""


def channel_grammar(answer: str) -> str:
    """Grammar of an answer on the channel ``final``, after messages on others."""
    return f"{HEAD}{_CHANNELS}answer: {answer}\n"


def thinking_grammar(grammar: str, token_id: TokenId) -> str:
    """Grammar of outputs that may begin with a text between ``<think>`` and ``</think>``; ``grammar``: of the rest."""
    opening = special(THINK_OPEN, token_id) or json.dumps(THINK_OPEN)
    closing = special(THINK_CLOSE, token_id)
    thinking = f"thinking: {opening} TEXT {closing}" if closing else f"thinking: {opening} thought"
    thought = "" if closing else f"\nthought[lazy]: TEXT {json.dumps(THINK_CLOSE)}"
    rest = grammar.replace(_START, "rest: ", 1)
    return f"{rest}{_START}(thinking BLANKS)? rest\nBLANKS: /[ \\t\\r\\n]*/\n{thinking}{thought}\n"
