"""Grammars of the SDK's options ``json_schema``, ``regex``, ``choice`` and ``grammar``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.types import Grammar, GrammarKind

KINDS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
}
"""Kinds of grammars by the names of their options."""


def build_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a request's options; ``InvalidRequestError`` for several, or for one of a wrong type."""
    named = [name for name in KINDS if name in given]
    if len(named) > 1:
        raise InvalidRequestError(named[1], f"cannot be set together with {named[0]}")
    after = given.get("grammar_after", "")
    if not isinstance(after, str):
        raise InvalidRequestError("grammar_after", f"must be a text, not {type(after).__name__}")
    if not named:
        if after:
            raise InvalidRequestError("grammar_after", f"needs one of {', '.join(KINDS)}")
        return None
    (name,) = named
    return Grammar(KINDS[name], _text(name, given[name]), after)


def _text(name: str, value: Any) -> str:  # noqa: ANN401 - what a caller gave
    if name == "json_schema":
        return _schema(value)
    if name == "choice":
        is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        value = list(value) if is_list else []
        if not value or not all(isinstance(text, str) for text in value):
            raise InvalidRequestError(name, "must be a list of texts, at least one")
        return json.dumps(value)
    if not isinstance(value, str):
        raise InvalidRequestError(name, f"must be a text, not {type(value).__name__}")
    return value


def _schema(value: Any) -> str:  # noqa: ANN401 - what a caller gave
    if isinstance(value, str):
        return value
    make_schema = getattr(value, "model_json_schema", None)
    schema = value if make_schema is None else make_schema()
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError("json_schema", f"must be an object or its text, not {type(value).__name__}")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError("json_schema", f"is no JSON: {error}") from error
