"""Values of arguments that a model writes as text, by the types of the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MOST_REFERENCES = 8
"""References followed for one type; a cycle ends here."""
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Types by names that JSON Schema does not have, and that tools are described by all the same."""


def parameters_of(tools: object) -> dict[str, Mapping[str, Any]]:
    """Name of each tool and the schemas of its parameters; what is no tool is left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            named = properties.items() if isinstance(properties, Mapping) else ()
            found[function["name"]] = {name: resolved(schema, parameters) for name, schema in named}
    return found


def resolved(schema: Any, root: Any) -> Any:  # noqa: ANN401 - JSON
    """The definition in ``root`` that a schema refers to, or the schema itself."""
    for _ in range(_MOST_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            return schema
        found = root
        for part in path.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return schema


def typed_value(text: str, schema: object) -> Any:  # noqa: ANN401 - JSON
    """The value that a text stands for: JSON where the schema has another type than a text, otherwise the text."""
    types = types_of(schema)
    if types == {"string"} or not types:
        return text
    stripped = text.strip()
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if stripped.lower() in ("null", "none") and ("null" in types or "string" not in types):
        return None
    try:
        value = json.loads(stripped)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return text
    if isinstance(value, float) and value.is_integer() and types <= {"integer", "null"}:
        return int(value)
    return value if "string" not in types or isinstance(value, _accepted(types - {"string"})) else text


def types_of(schema: object) -> set[str]:
    """Types that a schema names or lists values of; empty if that is not plain."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    listed = given if isinstance(given, list | tuple) else [given]
    found = {_PYTHON_NAMES.get(kind, kind) for kind in listed if isinstance(kind, str)}
    for branch in branches_of(schema):
        found |= types_of(branch)
    if not found and isinstance(schema.get("enum"), list):
        found = {name for name, kinds in _KINDS.items() if any(type(value) in kinds for value in schema["enum"])}
    return found & _KINDS.keys()


def branches_of(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas of which a value has to match one."""
    lists = [schema.get(word) for word in ("anyOf", "oneOf")]
    return [branch for branches in lists if isinstance(branches, list | tuple) for branch in branches]


def _accepted(types: set[str]) -> tuple[type, ...]:
    return tuple(kind for name in types for kind in _KINDS[name])
