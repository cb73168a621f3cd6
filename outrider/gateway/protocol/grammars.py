"""Fields that constrain the output: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidRequestError

_OPTIONS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""vLLM's names, and those of the SDK's options."""
_ANY_OBJECT = {"type": "object"}
_UNSUPPORTED = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarField:
    """A grammar, and the field of the request that it comes from."""

    field: str
    option: str
    """The SDK's option."""
    value: Any


def grammar_of(body: Json) -> GrammarField | None:
    """The grammar of a request; ``InvalidRequestError`` for several, or for one that is malformed."""
    found = [*_of_response_format(body), *_of_structured_outputs(body), *_of_guided(body)]
    if len(found) > 1:
        raise InvalidRequestError(found[1].field, f"cannot be set together with {found[0].field}")
    return found[0] if found else None


def _of_response_format(body: Json) -> list[GrammarField]:
    given = body.get("response_format")
    if given is None:
        return []
    kind = given.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [GrammarField("response_format", "json_schema", _ANY_OBJECT)]
    if kind != "json_schema":
        raise InvalidRequestError("response_format.type", f"must be text, json_object or json_schema, not {kind!r}")
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("response_format.json_schema", "must be an object with a schema")
    return [GrammarField("response_format.json_schema.schema", "json_schema", schema)]


def _of_structured_outputs(body: Json) -> list[GrammarField]:
    given = body.get("structured_outputs")
    if given is None:
        return []
    for name in _UNSUPPORTED:
        if given.get(name):
            raise InvalidRequestError(f"structured_outputs.{name}", "is not supported")
    named = [
        GrammarField(f"structured_outputs.{name}", option, given[name])
        for name, option in _OPTIONS.items()
        if given.get(name) is not None
    ]
    if given.get("json_object"):
        named.append(GrammarField("structured_outputs.json_object", "json_schema", _ANY_OBJECT))
    if not named:
        raise InvalidRequestError("structured_outputs", "must have one of json, regex, choice, grammar and json_object")
    return named


def _of_guided(body: Json) -> list[GrammarField]:
    return [
        GrammarField(f"guided_{name}", option, body[f"guided_{name}"])
        for name, option in _OPTIONS.items()
        if body.get(f"guided_{name}") is not None
    ]
