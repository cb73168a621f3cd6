"""``<function=NAME><parameter=NAME>value</parameter></function>`` in ``<tool_call>``: Qwen3-Coder and Qwen3.5."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event, split_at
from outrider.tokenization.output_parsing.json_calls import HeldTextParser
from outrider.tokenization.output_parsing.schema_types import typed_value

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(HeldTextParser):
    """Parser of one output. Arguments are streamed one parameter at a time, since a value's type is that of its schema.

    ``parameters``: name of each tool and the schemas of its parameters.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._parameters = parameters
        super().__init__()
        self._form = "content"
        """Part that is read: content, function (its name), parameters, parameter (its name), or value."""
        self._schemas: Mapping[str, Any] = {}
        self._key = ""
        self._num_parameters = 0

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        steps = {
            "content": self._read_content,
            "function": self._read_function,
            "parameters": self._read_parameters,
            "parameter": self._read_parameter,
            "value": self._read_value,
        }
        before = ("", "")
        while self._held and (self._form, self._held) != before:
            before = (self._form, self._held)
            yield from steps[self._form](is_final=is_final)

    def _read_content(self, *, is_final: bool) -> Iterator[Event]:
        before, marker, self._held = split_at(self._held, (_BEGIN, _END, _FUNCTION), is_final=is_final)
        if before:
            yield Content(before)
        if marker == _FUNCTION:
            self._form = "function"

    def _read_function(self, *, is_final: bool) -> Iterator[Event]:
        name, closing, rest = self._held.partition(">")
        if closing:
            name = name.strip()
            self._schemas, self._num_parameters = self._parameters.get(name, {}), 0
            self._form, self._held = "parameters", rest
            yield CallStart(name)
            yield CallArguments("{")

    def _read_parameters(self, *, is_final: bool) -> Iterator[Event]:
        _, marker, self._held = split_at(self._held, (_PARAMETER, _FUNCTION_END, _END), is_final=is_final)
        if marker == _PARAMETER:
            self._form = "parameter"
        elif marker:
            self._form = "content"
            yield CallArguments("}")

    def _read_parameter(self, *, is_final: bool) -> Iterator[Event]:
        key, closing, rest = self._held.partition(">")
        if closing:
            self._key, self._form, self._held = key.strip(), "value", rest
        yield from ()

    def _read_value(self, *, is_final: bool) -> Iterator[Event]:
        # A model may leave out the end of a parameter.
        found = [
            (position, marker)
            for marker in (_PARAMETER_END, "\n" + _PARAMETER, _FUNCTION_END)
            if (position := self._held.find(marker)) >= 0
        ]
        if not found:
            return
        position, _ = min(found)
        value, rest = self._held[:position], self._held[position:]
        self._held = rest.removeprefix(_PARAMETER_END)
        self._form = "parameters"
        typed = typed_value(_without_margins(value), self._schemas.get(self._key))
        separator = ", " if self._num_parameters else ""
        self._num_parameters += 1
        yield CallArguments(f"{separator}{json.dumps(self._key)}: {json.dumps(typed, ensure_ascii=False)}")


def _without_margins(value: str) -> str:
    """The value without the line breaks that set it off from its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def is_tag_name(name: str) -> bool:
    """True if a call with such a parameter can be read."""
    return ">" not in name and name == name.strip()
