"""JSON schemas in the form that the grammar engine takes, and paths of keywords that it does not support.

Formats that JSON Schema does not define are annotations and are left out, as are keywords that refuse nothing. ``not``,
``oneOf``, dependencies and ``unevaluatedProperties`` are rewritten where their meaning can be said otherwise. All that
is left unsupported is refused, never ignored.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from outrider.structured_output.finite_values import without_refused_values
from outrider.structured_output.patterns import FORMATS, engine_pattern
from outrider.structured_output.presence import without_conditions
from outrider.structured_output.property_names import (
    UNDECLARED,
    with_least_properties,
    with_undeclared_pattern,
    without_name_schema,
)
from outrider.structured_output.references import resolved_reference, with_definitions
from outrider.structured_output.unions import without_exclusive_union
from outrider.types import Grammar, GrammarKind

_ONE = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_ENGINE_FORMATS = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
_NARROWED = {"idn-email": "email", "idn-hostname": "hostname"}
"""Formats that the engine does not know, and ones of it that accept less."""
_IN_PLACE = frozenset(
    ("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "dependencies", "dependentSchemas", "if", "not", "oneOf")
)
"""Keywords whose own schemas evaluate properties of the same object."""
_DEPENDENCIES = ("dependencies", "dependentRequired")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_REMAINDERS = 50_000
"""Bound on ``multipleOf`` without its factors of 10, which takes 0.3 s to compile there and grows with it."""
_FEW_REMAINDERS = 50
"""Bound where the factors of 10 are many."""
_JOINING = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords by which several schemas hold for one value."""
_FARTHEST = 9_000_000_000_000_000_000
"""Farthest bound of numbers that the engine takes, next to those of integers of 64 bits. Farther ones are brought to
it, so that no more is accepted.
"""
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_MOST_DEEP = 128
"""Nesting of a schema, below Python's recursion limit."""
BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
"""Blanks between two parts of JSON. They are bounded, as a model may go on with blanks until its output is full."""
_EMBEDDED = "%json "
"""Prefix of a schema in a grammar of the engine."""
_PATH = "$comment"
_PATH_HEAD = "path in the request: "
_ENGINE_OPTIONS = "x-guidance"
"""A key by which a schema could ask the engine to ignore what it does not support."""

Json = Any


def prepare_schema(schema: Json) -> Json:
    """The schema as the engine takes it; ``ValueError`` for one that is nested too deeply, or that the engine takes
    and does not keep to.
    """
    try:
        if isinstance(schema, Mapping):
            schema = with_definitions(schema, {path for path, _ in subschemas(schema)})
        found = _prepare(schema, 0, schema)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    together: set[float] = set()
    for path, own in subschemas(found):
        if _counts_repeated_names(own):
            raise ValueError(f"{path}/minProperties is not supported beyond required names and one more")
        if _has_many_remainders(_divisors(own)):
            most = f"{_MOST_REMAINDERS:,}"
            raise ValueError(f"{path}/multipleOf is not supported above {most}, unless by factors of 10")
        together.update(_divisors(own))
    if _has_many_remainders(together) and find_keyword(found, _JOINING):
        path = find_keyword(found, ["multipleOf"])
        raise ValueError(f"{path} is not supported beside others: their multiple is above {_MOST_REMAINDERS:,}")
    return found


def _divisors(schema: Mapping[str, Json]) -> list[float]:
    given = schema.get("multipleOf")
    return [given] if isinstance(given, int | float) and not isinstance(given, bool) else []


def _prepare(schema: Json, depth: int, root: Json) -> Json:
    if depth > _MOST_DEEP:
        raise ValueError(f"is nested more than {_MOST_DEEP} deep")
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _prepare_value(key, value, depth + 1, root) for key, value in schema.items()}
    found = _with_kept_format(found)
    found = {key: value for key, value in found.items() if not _says_nothing(key, value, found)}
    if "unevaluatedProperties" in found and _IN_PLACE.isdisjoint(found):
        found["additionalProperties"] = found.pop("unevaluatedProperties")
    for keyword in _DEPENDENCIES:
        found = _with_dependencies(found, keyword) if keyword in found else found
    if "propertyNames" in found:
        found = without_name_schema(found, resolved_reference(schema["propertyNames"], root))
    found = without_exclusive_union(found, root) if "oneOf" in found else found
    found = without_refused_values(_without_not(found) if "not" in found else found)
    found = without_conditions(found)
    return with_undeclared_pattern(with_least_properties(found))


def _prepare_value(key: str, value: Json, depth: int, root: Json) -> Json:
    if key in _NAMED and isinstance(value, Mapping):
        are_patterns = key == "patternProperties"
        named = {engine_pattern(name) if are_patterns else name: entry for name, entry in value.items()}
        return {name: _prepare(entry, depth, root) for name, entry in named.items()}
    if key in _LISTS and isinstance(value, list):
        return [_prepare(entry, depth, root) for entry in value]
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key in ("minimum", "exclusiveMinimum") and isinstance(value, int | float) and value < -_FARTHEST:
        return -_FARTHEST
    if key in ("maximum", "exclusiveMaximum") and isinstance(value, int | float) and value > _FARTHEST:
        return _FARTHEST
    if key == "pattern" and isinstance(value, str):
        return engine_pattern(value)
    return _prepare(value, depth, root) if key in _ONE else value


def _with_kept_format(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema without a format that JSON Schema does not define, and with patterns for those of it that the engine
    does not know.
    """
    given = schema.get("format")
    if not isinstance(given, str) or given in _ENGINE_FORMATS:
        return schema
    if given in _NARROWED:
        return {**schema, "format": _NARROWED[given]}
    rest = {key: value for key, value in schema.items() if key != "format"}
    if given not in FORMATS:
        return rest
    others = rest.get("allOf", [])
    return {**rest, "allOf": [*others, {"pattern": FORMATS[given]}]} if isinstance(others, list) else schema


def _counts_repeated_names(schema: Mapping[str, Json]) -> bool:
    """True for a least number of properties that the engine counts with names that are not declared, which may come
    twice.
    """
    least, required = schema.get("minProperties"), schema.get("required", ())
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else ()
    return type(least) is int and not is_closed and least > len(set(names)) + 1


def _has_many_remainders(divisors: Iterable[float]) -> bool:
    """True for multiples of all of these that the engine follows by too many remainders."""
    multiple, rest = count_remainders(divisors)
    return rest > _MOST_REMAINDERS or (rest > _FEW_REMAINDERS and multiple > 2 * _MOST_REMAINDERS)


def count_remainders(divisors: Iterable[float]) -> tuple[int, int]:
    """Least common multiple of numbers, in units of their last place, and what is left of it without its factors of 10,
    of which the engine follows each remainder.
    """
    scaled = [Decimal(repr(divisor)) for divisor in divisors if divisor > 0 and math.isfinite(divisor)]
    places = max((-int(number.as_tuple().exponent) for number in scaled), default=0)
    multiple = math.lcm(*(int(number.scaleb(max(places, 0))) for number in scaled))
    rest = multiple
    while rest % 10 == 0:
        rest //= 10
    return multiple, rest


def _says_nothing(keyword: str, value: Json, schema: Mapping[str, Json]) -> bool:
    """True for a keyword that refuses nothing beside the others of its schema."""
    is_empty = isinstance(value, Mapping) and not value
    accepts_all = is_empty or value is True
    match keyword:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return accepts_all or (isinstance(value, Mapping) and dict(value) == {"type": "string"})
        case "unevaluatedProperties":
            return accepts_all or "additionalProperties" in schema
        case "unevaluatedItems":
            return accepts_all or isinstance(schema.get("items"), bool | Mapping)
        case "dependentSchemas":
            return is_empty
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "contains" | "minContains":
            least = schema.get("minContains", 1)
            return "contains" not in schema or (type(least) is int and least == 0 and "maxContains" not in schema)
        case "maxContains":
            return "contains" not in schema
    return False


def _with_dependencies(schema: dict[str, Json], keyword: str) -> dict[str, Json]:
    """The schema without dependencies that say nothing: what a required property depends on is required too."""
    given = schema[keyword]
    required = schema.get("required", [])
    if not isinstance(given, Mapping) or not isinstance(required, list):
        return schema
    needed = {name: names for name, names in given.items() if _are_texts(names)}
    found = [name for name in required if isinstance(name, str)]
    for name in found:  # grows
        found += [other for other in needed.get(name, ()) if other not in found]
    left = {name: names for name, names in given.items() if name not in needed or not set(needed[name]) <= set(found)}
    rest = {key: value for key, value in schema.items() if key != keyword}
    rest |= {"required": found} if found else {}
    return {**rest, keyword: left} if left else rest


def _without_not(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema with ``not`` said otherwise, if it can be: a double one, one of nothing, or one of types alone."""
    refused = schema["not"]
    rest = {key: value for key, value in schema.items() if key != "not"}
    if refused is False:
        return rest
    if isinstance(refused, Mapping) and refused.keys() == {"not"}:
        others = rest.get("allOf", [])
        return {**rest, "allOf": [*others, refused["not"]]} if isinstance(others, list) else schema
    if isinstance(refused, Mapping) and refused.keys() == {"type"} and (types := _other_types(refused["type"], rest)):
        return {**rest, "type": types}
    return schema


def _other_types(refused: Json, rest: Mapping[str, Json]) -> list[str]:
    """Types of the schema without the refused ones; empty if they cannot be listed."""
    given = rest.get("type", list(_TYPES))
    without, own = ([kinds] if isinstance(kinds, str) else kinds for kinds in (refused, given))
    if not (_are_texts(without) and _are_texts(own)):
        return []  # a type that the engine refuses
    if "integer" in without and "number" not in without:
        return []  # numbers that are no integers are no type
    return [kind for kind in own if kind not in without and not (kind == "integer" and "number" in without)]


def _are_texts(found: Json) -> bool:
    return isinstance(found, list) and all(isinstance(entry, str) for entry in found)


def embedded_schema(schema: Json, path: str) -> str:
    """A schema as a part of a grammar of the engine; ``ValueError`` says what it is instead of one. ``path``: of the
    schema in the request, for messages.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"must be an object, not {type(schema).__name__}")
    own = {**with_path(prepare_schema(schema), path), _ENGINE_OPTIONS: {"whitespace_pattern": BLANKS}}
    return f"{_EMBEDDED}{json.dumps(own)}"


def schemas_of(grammar: Grammar) -> Iterator[Json]:
    """The schema of a grammar, as it is compiled, or those embedded in it."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        yield prepare_schema(parse_schema(grammar.text))
    for part in grammar.text.split(_EMBEDDED)[1:] if grammar.kind is GrammarKind.LARK else ():
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(part)[0]


def find_keyword(schema: Json, keywords: Sequence[str]) -> str:
    """JSON pointer of the first of these keywords, itself included; empty if there is none."""
    for path, own in subschemas(schema):
        for keyword in keywords:
            if keyword in own:
                return f"{path}/{keyword}"
    return ""


def subschemas(schema: Json, path: str = "") -> Iterator[tuple[str, Mapping[str, Json]]]:
    """A schema and those within it, each after its JSON pointer, or its path in the request; outer ones first."""
    if not isinstance(schema, Mapping):
        return
    path = _own_path(schema) or path
    yield path, schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            for name, entry in value.items():
                place = "additionalProperties" if name.startswith(UNDECLARED) else f"{key}/{name}"
                yield from subschemas(entry, f"{path}/{place}")
        elif key in _LISTS and isinstance(value, list):
            for index, entry in enumerate(value):
                yield from subschemas(entry, f"{path}/{key}/{index}")
        elif key in _ONE:
            yield from subschemas(value, f"{path}/{key}")


def with_path(schema: Mapping[str, Json], path: str) -> dict[str, Json]:
    """The schema with its path in the request, for messages, as a part of a grammar that is made of several; one that
    has its path keeps it.
    """
    return {**schema, _PATH: _PATH_HEAD + (_own_path(schema) or path)}


def _own_path(schema: Mapping[str, Json]) -> str:
    comment = schema.get(_PATH)
    return comment.removeprefix(_PATH_HEAD) if isinstance(comment, str) and comment.startswith(_PATH_HEAD) else ""


def parse_schema(text: str) -> Json:
    """The schema of a JSON text; ``ValueError`` says what it is instead."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("accepts nothing")
    if not isinstance(schema, dict):
        raise ValueError(f"must be an object or a boolean, not {type(schema).__name__}")
    schema.pop(_ENGINE_OPTIONS, None)
    return schema
