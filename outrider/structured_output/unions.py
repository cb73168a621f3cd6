"""Unions (``oneOf``) whose branches exclude each other, written as ``anyOf``.

The engine compares branches without following references. Branches exclude each other by their types, by the values
that they list, or by those that they list for a property of objects that both require.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.structured_output.references import resolved_reference

_MOST_BRANCHES = 64
"""Bound on the branches of a union, which are compared in pairs."""
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))

Json = Any


def without_exclusive_union(schema: dict[str, Json], root: Json) -> dict[str, Json]:
    """The schema, with ``anyOf`` for a ``oneOf`` of branches that exclude each other. ``root``: the document that
    references are in. Branches named by a ``discriminator`` are told apart by it, so they require it.
    """
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or len(branches) > _MOST_BRANCHES or "anyOf" in schema:
        return schema
    found = [_resolved(branch, root) for branch in branches]
    if (name := _discriminator(schema)) is not None and all(_tags(branch, name) for branch in found):
        branches = [{**branch, "required": [*_required(branch), name]} for branch in branches]
        found = [{**branch, "required": [*_required(branch), name]} for branch in found]
    if not all(_exclude(*pair) for pair in itertools.combinations(found, 2)):
        return schema
    return {**{key: value for key, value in schema.items() if key != "oneOf"}, "anyOf": branches}


def _resolved(branch: Json, root: Json) -> Mapping[str, Json]:
    """The branch, or what it refers to, which accepts no less; an empty schema for what is not known."""
    found = resolved_reference(branch, root)
    return found if isinstance(found, Mapping) else {}


def _discriminator(schema: Mapping[str, Json]) -> str | None:
    given = schema.get("discriminator")
    name = given.get("propertyName") if isinstance(given, Mapping) else None
    return name if isinstance(name, str) else None


def _required(schema: Json) -> list[Json]:
    given = schema.get("required") if isinstance(schema, Mapping) else None
    return given if isinstance(given, list) else []


def _exclude(one: Mapping[str, Json], other: Mapping[str, Json]) -> bool:
    if _types(one).isdisjoint(_types(other)):
        return True
    values, others = _listed(one), _listed(other)
    if values and others and values.isdisjoint(others):
        return True
    if _types(one) & _types(other) != {"object"}:
        return False
    shared = [name for name in _required(one) if isinstance(name, str) and name in _required(other)]
    pairs = [(_tags(one, name), _tags(other, name)) for name in shared]
    return any(tags and others and tags.isdisjoint(others) for tags, others in pairs)


def _tags(schema: Mapping[str, Json], name: str) -> frozenset[str]:
    """Values listed for a property; empty if there is no list."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    return _listed(own) if isinstance(own, Mapping) else frozenset()


def _types(schema: Mapping[str, Json]) -> frozenset[str]:
    """Types of the values that a schema accepts, integers as numbers."""
    given = schema.get("type", [*_TYPES])
    kinds: Sequence[Json] = given if isinstance(given, list) else [given]
    return frozenset("number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str))


def _listed(schema: Mapping[str, Json]) -> frozenset[str]:
    """JSON texts of the values that a schema lists; empty if it lists none, or others than plain ones."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(value is None or isinstance(value, str | int) for value in values):
        return frozenset()
    return frozenset(map(json.dumps, values))
