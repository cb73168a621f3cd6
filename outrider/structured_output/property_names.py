"""Names of properties: ``propertyNames``, ``minProperties``, and undeclared names that escapes could make equal to
declared ones.

The engine compares an undeclared name with declared ones as it is written, and a name of a pattern as it is read. So
beside declared names that are often written with escapes, undeclared ones become those of a pattern that no declared
name matches. Elsewhere they do not: the mask of a name's first token then takes 2 ms instead of 0.2 (124,704 tokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.structured_output.finite_values import joined_parts
from outrider.structured_output.patterns import engine_pattern

_MOST_CHARACTERS = 4_000
"""Bound on those of all declared names, each of which is a part of the pattern."""
_LONGEST_NAME = 60
"""Bound on characters of one name, each of which is a level of groups, of which the engine takes 250."""
_MOST_ALTERNATIVES = 32
"""Bound on declared names of which one has to come."""
_ANY = r"[\s\S]"
UNDECLARED = "^(?:)"
"""Prefix of the pattern of undeclared names."""

Json = Any


def without_name_schema(schema: dict[str, Json], names: Json) -> dict[str, Json]:
    """The schema without a ``propertyNames`` that lists names, or that is a pattern where no others are declared.
    ``names``: that keyword's schema as it was given.
    """
    if not isinstance(names, Mapping) or "patternProperties" in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    others, declared = rest.get("additionalProperties", {}), rest.get("properties", {})
    listed = [names["const"]] if "const" in names else names.get("enum")
    says = names.keys() - {"title", "description", "$comment"}
    if isinstance(listed, list) and isinstance(declared, Mapping) and says <= {"type", "enum", "const"}:
        known = [name for name in listed if isinstance(name, str)]
        own = {name: declared.get(name, others) for name in known}
        return {**rest, "properties": own, "additionalProperties": False}
    if (
        says <= {"type", "pattern"}
        and names.get("type", "string") == "string"
        and isinstance(names.get("pattern"), str)
        and not declared
    ):
        return {**rest, "patternProperties": {engine_pattern(names["pattern"]): others}, "additionalProperties": False}
    return schema


def with_least_properties(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema without ``minProperties``, its own or of its ``allOf``, if as many names are required anyway, or if it
    is 1: then one of the declared names is required.
    """
    parts = list(joined_parts(schema))
    counts = [part["minProperties"] for part in parts if "minProperties" in part]
    if not counts or not all(type(count) is int for count in counts):
        return schema
    least = max(counts)
    required = {name for part in parts if isinstance(part.get("required"), list) for name in part["required"]}
    declared = {
        name: None for part in parts if isinstance(part.get("properties"), Mapping) for name in part["properties"]
    }
    rest: dict[str, Json] = {key: value for key, value in schema.items() if key != "minProperties"}
    if isinstance(rest.get("allOf"), list):
        rest["allOf"] = [_without_least(member) for member in rest["allOf"]]
    if least <= len(required):
        return rest
    if least == 1 and 0 < len(declared) <= _MOST_ALTERNATIVES and "anyOf" not in schema:
        return {**rest, "anyOf": [{"required": [name]} for name in declared]}
    return schema


def _without_least(member: Json) -> Json:
    is_schema = isinstance(member, Mapping)
    return {key: value for key, value in member.items() if key != "minProperties"} if is_schema else member


def with_undeclared_pattern(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema with undeclared names as a pattern, if it accepts some beside declared ones that are not in ASCII."""
    declared, others = schema.get("properties"), schema.get("additionalProperties", True)
    if not isinstance(declared, Mapping) or others is False or "patternProperties" in schema:
        return schema
    if all(map(str.isascii, declared)):
        return schema
    if sum(map(len, declared)) > _MOST_CHARACTERS or max(map(len, declared)) > _LONGEST_NAME:
        return schema
    return {
        **schema,
        "patternProperties": {f"{UNDECLARED}{_none_of(declared)}$": others},
        "additionalProperties": False,
    }


def _none_of(names: Iterable[str]) -> str:
    """Regular expression of all texts but these, which follows them character by character."""
    by_first: dict[str, list[str]] = {}
    for name in names:
        by_first.setdefault(name[:1], []).append(name[1:])
    firsts = [first for first in by_first if first]
    parts = [] if "" in by_first else [""]
    parts.append(engine_pattern(f"[^{''.join(map(_in_class, firsts))}]{_ANY}*") if firsts else f"{_ANY}+")
    parts += [f"{re.escape(first)}{_none_of(by_first[first])}" for first in firsts]
    return f"(?:{'|'.join(parts)})"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in r"\]^-[&~" else character
