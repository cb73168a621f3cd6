"""Conditions on which properties an object has, as unions: ``oneOf`` of required names, ``not`` of them, and what
properties depend on. The engine knows none of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST_ALTERNATIVES = 32
"""Bound on the branches of all unions of a schema together, each of which the engine joins with the rest."""
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")

_OBJECT = {"type": "object"}
"""Other values have all names that are required, so neither of the first two conditions accepts them."""

Json = Any


def without_conditions(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema with unions for the conditions that can be said so."""
    found, rest = [], dict(schema)
    may_be_object = schema.get("type", "object") == "object"
    if may_be_object and (alternatives := _exactly_one(schema.get("oneOf"))):
        found.append(alternatives)
        rest = {**rest, **_OBJECT}
        del rest["oneOf"]
    if may_be_object and (names := _only_required(schema.get("not"))):
        found.append([_absent([name]) for name in names])
        rest = {**rest, **_OBJECT}
        del rest["not"]
    for keyword in _DEPENDENCIES:
        if isinstance(given := schema.get(keyword), Mapping):
            known = {name: needed for name, value in given.items() if (needed := _needed(value)) is not None}
            found += [[_absent([name]), needed] for name, needed in known.items()]
            rest[keyword] = {name: value for name, value in given.items() if name not in known}
            if not rest[keyword]:
                del rest[keyword]
    others = schema.get("allOf", [])
    if not found or not isinstance(others, list) or math.prod(map(len, found)) > _MOST_ALTERNATIVES:
        return schema
    return {**rest, "allOf": [*others, *({"anyOf": alternatives} for alternatives in found)]}


def _absent(names: Sequence[str]) -> Json:
    return {"properties": dict.fromkeys(names, False)}


def _needed(given: Json) -> Json:
    """Schema of what a property depends on: names, or a schema; None for neither."""
    if isinstance(given, Mapping):
        return given
    is_list = isinstance(given, list) and all(isinstance(name, str) for name in given)
    return {"required": given} if is_list else None


def _only_required(schema: Json) -> list[str]:
    """Names that a schema requires, if that is all it says."""
    names = schema.get("required") if isinstance(schema, Mapping) and len(schema) == 1 else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _exactly_one(branches: Json) -> list[Json]:
    """Alternatives to branches that say nothing but which names they require: those of one, and not all of another."""
    is_short = isinstance(branches, list) and len(branches) <= _MOST_ALTERNATIVES
    required = list(map(_only_required, branches)) if is_short else []
    return list(itertools.chain.from_iterable(_alternatives(required))) if len(required) > 1 and all(required) else []


def _alternatives(required: Sequence[Sequence[str]]) -> Iterator[list[Json]]:
    for index, names in enumerate(required):
        known, rest = frozenset(names), [*required[:index], *required[index + 1 :]]
        missing = [[name for name in others if name not in known] for others in rest]
        if math.prod(map(len, missing)) > _MOST_ALTERNATIVES:
            yield [{}] * (_MOST_ALTERNATIVES + 1)
            return
        yield [{"required": names, **_absent(absent)} for absent in itertools.product(*missing)]
