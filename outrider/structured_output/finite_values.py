"""Schemas of listed values (``enum``, ``const``): what a ``not`` beside them refuses is taken off the list.

The engine itself judges each value against the refused schema. A ``not`` that it cannot judge for certain is left.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

_MOST_VALUES = 1_000
_MOST_TEXTS = 64
"""Of one value: an object has one for each order of its properties."""

Json = Any


def without_refused_values(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema, with ``not`` of itself and of its ``allOf`` applied to the values that one of them lists."""
    parts = [dict(part) for part in _parts(schema)]
    listing = next((part for part in parts if _values(part) is not None), None)
    if listing is None or not any("not" in part for part in parts):
        return schema
    for part in parts:
        values = _values(listing)
        if "not" not in part or values is None:
            continue
        judged = [_is_accepted(part["not"], value) for value in values]
        if None not in judged:
            del part["not"]
            listing.pop("const", None)
            listing["enum"] = [value for value, refused in zip(values, judged, strict=True) if not refused]
    own, members = parts[0], iter(parts[1:])
    if "allOf" in own:
        own["allOf"] = [next(members) if isinstance(part, Mapping) else part for part in own["allOf"]]
    return own


def _parts(schema: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
    yield schema
    members = schema.get("allOf")
    yield from (part for part in members if isinstance(part, Mapping)) if isinstance(members, list) else ()


def _values(part: Mapping[str, Json]) -> list[Json] | None:
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) and len(values) <= _MOST_VALUES else None


def _is_accepted(schema: Json, value: Json) -> bool | None:
    """True if the schema accepts the value; None if that is not certain."""
    texts = list(itertools.islice(_texts(value), _MOST_TEXTS + 1))
    if not texts or len(texts) > _MOST_TEXTS or '"$ref"' in json.dumps(schema):
        return None
    if isinstance(schema, bool):
        return schema
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError:
        return None
    engine = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if engine.is_error():
        return None
    return any(_matches(engine.deep_copy(), text.encode()) for text in texts)


def _matches(engine: LLMatcher, text: bytes) -> bool:
    return bool(engine.try_consume_tokens(list(text)) == len(text) and engine.is_accepting())


def _texts(value: Json) -> Iterator[str]:
    """JSON texts of a value, its objects in every order; none for a value that has forms the engine may not know."""
    if isinstance(value, float):
        text = json.dumps(int(value) if math.isfinite(value) and value.is_integer() else value)
        yield from (text,) if text.lstrip("-").replace(".", "").isdecimal() else ()
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        yield from (text,) if text == f'"{value}"' else ()
    elif isinstance(value, list):
        for parts in itertools.product(*map(_bounded, value)):
            yield f"[{','.join(parts)}]"
    elif isinstance(value, Mapping):
        for names in itertools.permutations(value):
            for parts in itertools.product(*(_bounded(value[name]) for name in names)):
                pairs = (
                    f"{json.dumps(name, ensure_ascii=False)}:{part}" for name, part in zip(names, parts, strict=True)
                )
                yield "{" + ",".join(pairs) + "}"
    else:
        yield json.dumps(value)


def _bounded(value: Json) -> list[str]:
    return list(itertools.islice(_texts(value), _MOST_TEXTS + 1))
