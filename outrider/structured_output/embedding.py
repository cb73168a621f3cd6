"""Grammars as parts of other grammars of the engine, which are in its form of Lark."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from outrider.structured_output.patterns import engine_pattern
from outrider.structured_output.schemas import embedded_schema, parse_schema
from outrider.types import GrammarKind

EMBEDDED_LARK = "%lark {\n"
"""Prefix of a grammar in another."""


def embedded_grammar(kind: GrammarKind, value: Any) -> str:  # noqa: ANN401 - JSON
    """A grammar as a part of another; ``ValueError`` says what it is instead of one. ``value``: a schema or its JSON
    text, a list of choices, or a text, as ``build_grammar`` of the client checks.
    """
    if kind is GrammarKind.JSON_SCHEMA:
        return embedded_schema(parse_schema(value) if isinstance(value, str) else value, "")
    if not value:
        raise ValueError("must not be empty")
    try:
        lark = to_lark(kind, value if isinstance(value, str) else json.dumps(list(value)))
    except Exception as error:  # of any type, by what is wrong
        raise ValueError(" ".join(str(error).split())) from error
    return f"{EMBEDDED_LARK}{lark}\n}}"


def to_lark(kind: GrammarKind, text: str) -> str:
    """A grammar of another kind than a JSON schema, whose ``text`` is that of ``Grammar``."""
    if kind is GrammarKind.REGEX:
        found: str = json.loads(LLMatcher.grammar_from_regex(engine_pattern(text)))["grammars"][0]["lark_grammar"]
        return found
    if kind is GrammarKind.CHOICE:
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return f"start: CHOICE\nCHOICE: {choices}"
    lark: str = any_to_lark(text)
    return lark
