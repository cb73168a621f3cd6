"""Grammars of outputs that may begin with reasoning, before what has to match a grammar.

Where the prompt opens the reasoning, it certainly comes first, and is free text (``Grammar.after``). Elsewhere the
model chooses: an output either opens it or begins with the answer.
"""

from __future__ import annotations

from outrider.tokenization.output_parsing.reasoning import THINK_CLOSE, THINK_OPEN
from outrider.tokenization.output_parsing.strict_calls import (
    ANSWER,
    HEAD,
    AnswerGrammar,
    TokenId,
    marker_of,
    text_until,
)

_START = "\nstart: "
"""The first rule of this name: that of an answer is in its last rule."""
_GAP = r"/\n{0,2}/"
"""Line ends between the reasoning and the rest, of which answers may begin with blanks too."""
_CHANNELS = f"""start: (message <|end|> <|start|> "assistant")* <|channel|> "final" <|message|> {ANSWER}
message: <|channel|> NAME <|message|> TEXT
NAME: "analysis" | "commentary"
"""


def answer_grammar(answer: AnswerGrammar) -> str:
    """Grammar of an answer alone."""
    return f"{HEAD}start: {ANSWER}\n{answer.rule}"


def channel_grammar(answer: AnswerGrammar) -> str:
    """Grammar of an answer on the channel ``final``, after messages on others."""
    return f"{HEAD}{_CHANNELS}{answer.rule}"


def thinking_grammar(grammar: str, token_id: TokenId) -> str:
    """Grammar of outputs that may begin with a text between ``<think>`` and ``</think>``; ``grammar``: of the rest."""
    thinking = f"thinking: {marker_of(THINK_OPEN, token_id)} thought\n{text_until('thought', THINK_CLOSE, token_id)}"
    head, rest = grammar.split(_START, 1)
    return f"{head}\nstart: (thinking {_GAP})? rest\n{thinking}rest: {rest}"
