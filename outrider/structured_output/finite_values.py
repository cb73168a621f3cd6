"""Schemas of listed values (``enum``, ``const``): what a ``not`` beside them refuses is taken off the list.

The engine itself judges each value against the refused schema. A ``not`` that it cannot judge for certain is left.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

_MOST_VALUES = 1_000
"""Bound on the listed values of a schema, whose texts are compared one by one."""
_MOST_TEXTS = 64
"""Bound on the texts of one value: an object has one for each order of its properties."""

Json = Any


def without_refused_values(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema, with ``not`` of itself and of its ``allOf`` applied to the values that one of them lists."""
    parts = [dict(part) for part in joined_parts(schema)]
    listing = next((part for part in parts if _values(part) is not None), None)
    if listing is None or not any("not" in part for part in parts):
        return schema
    for part in parts:
        values = _values(listing)
        if "not" not in part or values is None:
            continue
        accepts = _judge_of(part["not"])
        judged = [accepts(value) for value in values]
        if None not in judged:
            del part["not"]
            listing.pop("const", None)
            listing["enum"] = [value for value, refused in zip(values, judged, strict=True) if not refused]
    own, members = parts[0], iter(parts[1:])
    if "allOf" in own:
        own["allOf"] = [next(members) if isinstance(part, Mapping) else part for part in own["allOf"]]
    return own


def joined_parts(schema: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
    """The schema and the members of its ``allOf``, all of which a value has to match."""
    yield schema
    members = schema.get("allOf")
    yield from (part for part in members if isinstance(part, Mapping)) if isinstance(members, list) else ()


def _values(part: Mapping[str, Json]) -> list[Json] | None:
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) and len(values) <= _MOST_VALUES else None


def _judge_of(schema: Json) -> Callable[[Json], bool | None]:
    """Judge of a schema, compiled once: true for a value that it accepts, None where that is not certain."""
    engine = _compiled(schema)

    def accepts(value: Json) -> bool | None:
        texts = list(itertools.islice(_texts(value), _MOST_TEXTS + 1))
        if not texts or len(texts) > _MOST_TEXTS:
            return None
        if isinstance(schema, bool):
            return schema
        return None if engine is None else any(_matches(engine.deep_copy(), text.encode()) for text in texts)

    return accepts


def _compiled(schema: Json) -> LLMatcher | None:
    """The engine for a schema without references, over bytes; None if it does not take the schema."""
    if isinstance(schema, bool) or '"$ref"' in json.dumps(schema):
        return None
    try:
        engine = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema), log_level=0)
    except ValueError:
        return None
    return None if engine.is_error() else engine


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
