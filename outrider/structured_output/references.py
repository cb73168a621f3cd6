"""References within a JSON schema (``$ref`` with a pointer), and definitions in places that are no schemas."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_MOST_REFERENCES = 8
"""Bound on references followed from one schema: a cycle ends here."""
_MOST_CHARACTERS = 1 << 20
"""Bound on all copies of definitions, which may be parts of each other."""
_DEFINITIONS = "$defs"
_COPY = "outrider-copy-"
"""Prefix of the names of copies."""

Json = Any


def resolved_reference(schema: Json, root: Json) -> Json:
    """The schema that a reference within the document leads to, or the schema itself; None if it leads nowhere."""
    for _ in range(_MOST_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if path is None:
            return schema
        schema = _at(path, root) if isinstance(path, str) and path.startswith("#/") else None
    return None


def with_definitions(schema: Mapping[str, Json], places: Collection[str]) -> Mapping[str, Json]:
    """The schema with copies, in ``$defs``, of what it refers to elsewhere, such as in ``#/components/schemas``: other
    keywords hold schemas that nothing else reads. ``places``: pointers of its own schemas. ``ValueError`` for too much.
    """
    moved: dict[str, Mapping[str, Json]] = {}
    num_characters = 0
    waiting = list(_references(schema))
    for reference in waiting:  # grows
        if reference in moved or reference.removeprefix("#") in places:
            continue
        if isinstance(found := _at(reference, schema), Mapping):
            moved[reference] = found
            num_characters += len(json.dumps(found))
            if num_characters > _MOST_CHARACTERS:
                raise ValueError(f"refers to more than {_MOST_CHARACTERS:,} characters beside its definitions")
            waiting += _references(found)
    if not moved:
        return schema
    given = schema.get(_DEFINITIONS)
    known = dict(given) if isinstance(given, Mapping) else {}
    names = {reference: f"{_COPY}{len(known) + index}" for index, reference in enumerate(moved)}
    copies = {names[reference]: found for reference, found in moved.items()}
    found = _renamed({**schema, _DEFINITIONS: known | copies}, names)
    return found if isinstance(found, Mapping) else schema


def _references(schema: Json) -> Iterator[str]:
    """Pointers of the references in a schema, and in what it holds besides."""
    entries = list(schema.values()) if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    if isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str) and path.startswith("#/"):
        yield path
    for entry in entries:
        yield from _references(entry)


def _renamed(schema: Json, names: Mapping[str, str]) -> Json:
    if isinstance(schema, list):
        return [_renamed(entry, names) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _renamed(entry, names) for key, entry in schema.items()}
    if isinstance(path := schema.get("$ref"), str) and path in names:
        found["$ref"] = f"#/{_DEFINITIONS}/{names[path]}"
    return found


def _at(pointer: str, root: Json) -> Json:
    found = root
    for part in pointer.removeprefix("#/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found
