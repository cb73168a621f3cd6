"""Grammars that enforce tool calls: one call of a named tool, or a list of calls of any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.structured_output import with_path

Json = dict[str, Any]
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def chosen_tool(tool_choice: object) -> str | None:
    """Name of the tool that must be called; None if none is named. ``InvalidRequestError`` for a malformed choice."""
    if tool_choice is None or isinstance(tool_choice, str):
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError("tool_choice", 'must be {"type": "function", "function": {"name": NAME}}')
    return name


def arguments_schema(tools: Sequence[Mapping[str, Any]], name: str) -> Json:
    """Schema of the arguments of a tool; ``InvalidRequestError`` if there is no such tool."""
    for tool_name, parameters in _parameters(tools):
        if tool_name == name:
            return parameters
    raise InvalidRequestError("tool_choice", f"names {name!r}, and there is no such tool")


def calls_schema(tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> Json:
    """Schema of a list of calls, ``{"name": ..., "parameters": {...}}`` each, at least one."""
    calls = []
    for index, (name, parameters) in enumerate(_parameters(tools)):
        try:
            own = _moved(parameters, f"#/items/anyOf/{index}/properties/parameters")
        except RecursionError:
            raise InvalidRequestError(f"tools[{index}].function.parameters", "is nested too deeply") from None
        properties = {"name": {"const": name}, "parameters": own}
        required = ["name", "parameters"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InvalidRequestError`` for the first tool that is not a function with a name."""
    _parameters(tools)


def _moved(schema: Any, place: str) -> Any:  # noqa: ANN401 - JSON
    """The schema as a part of another one, at ``place``: references within it go there."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def _parameters(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, Json]]:
    found = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(function, Mapping):
            raise InvalidRequestError(f"tools[{index}].function", "must be an object with a name")
        found.append((name, _of_objects(function.get("parameters"), f"tools[{index}].function.parameters")))
    return found


def _of_objects(parameters: object, field: str) -> Json:
    """Schema of arguments, which are an object also where it does not say so."""
    given = parameters or _NO_PARAMETERS
    if not isinstance(given, Mapping):
        raise InvalidRequestError(field, f"must be an object, not {type(given).__name__}")
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(field, f"must have the type object, not {kind!r}")
    return with_path({**given, "type": "object"}, field)
