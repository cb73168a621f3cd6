"""Grammars of outputs in which a model may call tools, and a call that has begun matches the tool's schema.

Where calls begin with a marker, text before, between and after them is free. Where they are the whole output, a text
may be anything that does not begin as a call does. The calls themselves have the form that the model's chat template
writes, so that most of their text is forced. Lark, as the engine takes it: ``%json`` is a JSON schema, ``[lazy]`` ends
a text at the first occurrence of its last part. A text of a grammar never matches an added token such as ``<think>``,
special or not, so markers are named by text and by id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.structured_output import embedded_grammar, embedded_schema
from outrider.tokenization.output_parsing.deepseek_v3 import (
    BLOCK_BEGIN,
    BLOCK_END,
    CALL_BEGIN,
    CALL_END,
    CALL_NAME,
    CALLS_BEGIN,
    CALLS_END,
)
from outrider.tokenization.output_parsing.pythonic import is_argument_name
from outrider.tokenization.output_parsing.qwen3_coder import is_tag_name
from outrider.tokenization.output_parsing.schema_types import branches_of, resolved, types_of
from outrider.types import GrammarKind

Json = Any
TokenId = Callable[[str], int | None]
"""Id of an added token, by its text."""
HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\n"
ANSWER = "answer"
"""Name of the rule of an ``AnswerGrammar``."""
_ANY_OBJECT: dict[str, Json] = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
_LINE = "\n"
_BLANKS = r"[ \t\r\n]{0,32}"
"""Blanks around calls, bounded as those in JSON are."""
_VALUE_END = "\n</parameter>\n"
_NOT_OF_CALLS = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
)
"""Keywords of an object that a form which writes properties one by one cannot keep to."""
_OF_TEXTS = ("type", "title", "description", "default", "examples", "anyOf", "oneOf")
"""Keywords of a text that a form without quotes can keep to."""


def strict_calls_grammar(
    parser: str | None, tools: Sequence[Mapping[str, Json]], token_id: TokenId, answer: AnswerGrammar | None = None
) -> str | None:
    """The grammar for tools of which at least one is ``strict``, or beside an ``answer`` with a grammar; None if there
    is neither, if no form is known, or if calls begin as an answer does.

    ``InvalidRequestError`` names a schema that is malformed.
    """
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    form = _FORMS.get(parser or "")
    if (
        form is None
        or not functions
        or (answer and form is _llama3_json)
        or not (answer or any(function.get("strict") for function in functions))
    ):
        return None
    made = [_Tool(index, function) for index, function in enumerate(functions)]
    return HEAD + form(made, token_id, "" if answer is None else ANSWER) + ("" if answer is None else answer.rule)


def enforced_channel_call(tools: Sequence[Mapping[str, Json]], name: str) -> str:
    """Grammar of an output on channels that ends with a call whose arguments match the tool's schema: of the tool
    ``name``, or of any if it is empty.
    """
    made = [_Tool(index, {**tool["function"], "strict": True}) for index, tool in enumerate(tools)]
    return f"{HEAD}{_channel_calls([tool for tool in made if name in ('', tool.name)], 'call', ())}"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammar that an output without calls matches."""

    value: Json
    """A JSON schema, a list of choices or a text, by the kind."""
    field: str
    """Field of the request."""
    kind: GrammarKind = GrammarKind.JSON_SCHEMA

    @property
    def rule(self) -> str:
        """The rule ``ANSWER`` of a grammar, its last one: the text in it may be anything."""
        try:
            return f"{ANSWER}: {embedded_grammar(self.kind, self.value)}\n"
        except ValueError as error:
            raise InvalidRequestError(self.field, str(error)) from error


class _Tool:
    """One tool: its name, and its parameters as a schema or, unless it is strict, as any object."""

    def __init__(self, index: int, function: Mapping[str, Json]) -> None:
        self.name = str(function.get("name", ""))
        self.rules: list[str] = []
        """Rules of parts that a call may have at several places."""
        self._index = index
        self.field = f"tools[{index}].function.parameters"
        self.is_strict = bool(function.get("strict"))
        given = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        if isinstance(given, Mapping) and not isinstance(given.get("type"), str):
            given = {**given, **_ANY_OBJECT}
        self.schema = given if self.is_strict else _ANY_OBJECT

    def arguments(self) -> str:
        """Grammar of the arguments."""
        return self.value(self.schema, "")

    def value(self, schema: Json, path: str) -> str:
        """Grammar of a value of a schema, which is at a path in that of the tool."""
        return _embedded(schema, self.field, self.field + path)

    def object_call(self, word: str = "arguments") -> str:
        """``{"name": NAME, "arguments": {...}}``."""
        head = '{"name": ' + json.dumps(self.name, ensure_ascii=False) + f', "{word}": '
        return f"{_text(head)} {self.arguments()} {_text('}')}"

    def python_call(self) -> str:
        """``NAME(KEY=VALUE, ...)`` of the properties in their order, with values as JSON writes them."""
        head, end = _text(f"{self.name}("), _text(")")
        if not self.is_strict:
            return f"{head} (other ({_text(', ')} other)*)? {end}"
        properties, required = self._properties(is_argument_name)
        parts = [f"part_{self._index}_{place}" for place in range(len(properties))]
        for part, (name, schema) in zip(parts, properties.items(), strict=True):
            self.rules.append(f"{part}: {_text(f'{name}=')} {self._shared_value(name, schema)}\n")
        later = [
            f"({_text(', ')} {part}){'' if name in required else '?'}"
            for name, part in zip(properties, parts, strict=True)
        ]
        num_first = next((place + 1 for place, name in enumerate(properties) if name in required), len(parts))
        beginnings = [" ".join([parts[place], *later[place + 1 :]]) for place in range(num_first)]
        maybe = "" if any(name in required for name in properties) else "?"
        return f"{head} ({_any_of(beginnings)}){maybe} {end}" if parts else f"{head} {end}"

    def tagged_call(self) -> str:
        """``<parameter=NAME>`` of each property in their order; those that are not required may be left out."""
        head = _text(f"<function={self.name}>\n")
        if not self.is_strict:
            return f"{head} other"
        properties, required = self._properties(is_tag_name)
        parts = []
        for name, schema in properties.items():
            part = f"{_text(f'<parameter={name}>')} {_text(_LINE)} {self._tagged_value(name, schema)}"
            parts.append(part if name in required else f"({part})?")
        return " ".join([head, *parts, _text("</function>")])

    def _properties(self, is_name: Callable[[str], bool]) -> tuple[Mapping[str, Json], Sequence[str]]:
        """Properties, and the names of those that are required. ``is_name`` tells names that can be read in a call."""
        schema = self.schema if isinstance(self.schema, Mapping) else {}
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type") != "object" or not isinstance(properties, Mapping):
            raise InvalidRequestError(self.field, "must be an object with properties, which are written one by one")
        if not isinstance(required, list | tuple) or not all(name in [*properties] for name in required):
            raise InvalidRequestError(self.field, "/required must list names of properties: no others are written")
        if unkept := [word for word in _NOT_OF_CALLS if word in schema]:
            raise InvalidRequestError(
                self.field, f"/{unkept[0]} is not supported: this model writes properties one by one"
            )
        if unread := [name for name in properties if not is_name(name)]:
            raise InvalidRequestError(
                self.field, f"/properties/{unread[0]} has a name that cannot be read in the calls of this model"
            )
        return properties, required

    def _property(self, name: str, schema: Json) -> Mapping[str, Json]:
        """Schema of a property, or the definition that it refers to."""
        if (found := resolved(schema, self.schema)) is True:
            return {}
        if not isinstance(found, Mapping):
            raise InvalidRequestError(
                self.field, f"/properties/{name} must be an object, or refer to one in the same schema"
            )
        return found

    def _shared_value(self, name: str, schema: Json) -> str:
        """A value of a property, whose references are the tool's."""
        shared = {word: self.schema[word] for word in _DEFINITIONS if word in self.schema}
        return self.value({**self._property(name, schema), **shared}, f"/properties/{name}")

    def _tagged_value(self, name: str, schema: Json) -> str:
        """A value and the end of its tag. Texts have no quotes, so only listed ones can be kept to."""
        found = self._property(name, schema)
        types = types_of(found)
        if types and "string" not in types:
            return f"{self._shared_value(name, schema)} {_text(_VALUE_END)}"
        listed = [found["const"]] if "const" in found else found.get("enum")
        if isinstance(listed, list):
            return f"({_any_of([_text(f'{_as_text(value)}{_VALUE_END}') for value in listed])})"
        if unkept := [word for part in _branches(found) for word in part if word not in _OF_TEXTS]:
            path = f"/properties/{name}/{unkept[0]}"
            raise InvalidRequestError(self.field, f"{path} is not supported in texts, which this model does not quote")
        return "value"


def _embedded(schema: Json, field: str, path: str) -> str:
    try:
        return embedded_schema(schema, path)
    except ValueError as error:
        raise InvalidRequestError(field, str(error)) from error


def _branches(schema: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    return [schema, *(part for part in branches_of(schema) if isinstance(part, Mapping))]


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _hermes(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    return _tagged_calls(_any_of([tool.object_call() for tool in tools]), token_id, answer)


def _qwen3_coder(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    calls = _any_of([tool.tagged_call() for tool in tools])
    ends = f"value[lazy]: TEXT {_text(_VALUE_END)}\nother[lazy]: TEXT {_text('</function>')}\n"
    return ends + _tagged_calls(calls, token_id, answer)


def _tagged_calls(calls: str, token_id: TokenId, answer: str) -> str:
    """Outputs with calls between ``<tool_call>`` and ``</tool_call>``."""
    closing = marker_of("</tool_call>", token_id)
    return _outputs(answer, "<tool_call>", token_id, f"{_text(_LINE)} ({calls}) {_text(_LINE)} {closing}")


def _mistral(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    """Grammar of all Mistral versions: a list of calls, or a name, with or without ``[ARGS]``, and the arguments."""
    marked = "" if (found := special("[ARGS]", token_id)) is None else f"{found}?"
    listed = _any_of([tool.object_call() for tool in tools])
    named = _any_of([f"{_text(tool.name)} {marked} {tool.arguments()}" for tool in tools])
    calls = f"/[ ]?/ {_text('[')} listed ({_text(', ')} listed)* {_text(']')} | named"
    return f"{_outputs(answer, '[TOOL_CALLS]', token_id, calls)}listed: {listed}\nnamed: {named}\n"


def _deepseek_v3(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    begin, name, end = (marker_of(text, token_id) for text in (CALL_BEGIN, CALL_NAME, CALL_END))
    bodies = _any_of([f"{_text(tool.name + BLOCK_BEGIN)} {tool.arguments()}" for tool in tools])
    listed = f"listed: {begin} {_text('function')} {name} ({bodies}) {_text(BLOCK_END)} {end}\n"
    calls = f"listed ({_text(_LINE)}? listed)* {marker_of(CALLS_END, token_id)}"
    return _outputs(answer, CALLS_BEGIN, token_id, calls) + listed


def _harmony(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    if answer:
        return _channel_calls(tools, f'<|channel|> "final" <|message|> {answer} | call', ())
    return _channel_calls(tools, "message | call", ("final",))


def _channel_calls(tools: Sequence[_Tool], last: str, others: Sequence[str]) -> str:
    """Messages on channels, of which ``last`` is the last; ``others``: further channels of messages."""
    bodies = [f"{_text(tool.name)} between {tool.arguments()}" for tool in tools]
    named = [f"{_text(tool.name)} header {tool.arguments()}" for tool in tools]
    names = _any_of([_text(name) for name in ("analysis", *others, "commentary")])
    return f"""start: (message <|end|> <|start|> "assistant")* ({last})
message: <|channel|> NAME <|message|> TEXT
NAME: {names}
call: <|channel|> "commentary to=functions." ({_any_of(bodies)}) | " to=functions." ({_any_of(named)})
header: <|channel|> "commentary" between
between: (/[ ]?/ <|constrain|> "json")? <|message|>
"""


def _llama3_json(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    tag = "" if (found := special("<|python_tag|>", token_id)) is None else f"{found}?"
    calls = _any_of([tool.object_call("parameters") for tool in tools])
    return _whole_output(answer, r"\{", f"{tag} call (/[ \\n]{{0,32}}[;,][ \\n]{{0,32}}/ call)*", calls)


def _pythonic(tools: Sequence[_Tool], token_id: TokenId, answer: str) -> str:
    start, end = (special(f"<|python_{word}|>", token_id) for word in ("start", "end"))
    listed = f"{_text('[')} call ({_text(', ')} call)* {_text(']')}"
    calls = _any_of([tool.python_call() for tool in tools])
    tagged = f"{start}? {listed} {end}?" if start and end else listed
    rules = "".join(rule for tool in tools for rule in tool.rules)
    return f"other: /[A-Za-z_][A-Za-z0-9_-]*=/ %json {{}}\n{rules}" + _whole_output(answer, r"\[", tagged, calls)


def _whole_output(answer: str, begin: str, calls: str, call: str) -> str:
    """Calls alone, or the answer, or a text that does not begin as calls do."""
    text = answer or f"/{_BLANKS}([^{begin} \\t\\r\\n](.|\\n)*)?/"
    return f"start: /{_BLANKS}/ {calls} | {text}\ncall: {call}\n"


def _outputs(answer: str, marker: str, token_id: TokenId, call: str) -> str:
    """Free text with calls in it, each after the marker; or the answer, or calls alone."""
    if answer:
        begin = marker_of(marker, token_id)
        return f"start: {answer} | {begin} call (/{_BLANKS}/ {begin} call)* /{_BLANKS}/\ncall: {call}\n"
    return f"start: (trigger call)* tail\ntail: TEXT\n{text_until('trigger', marker, token_id)}call: {call}\n"


def text_until(rule: str, marker: str, token_id: TokenId) -> str:
    """Rules of a text that ends with a marker."""
    spelled = f"{rule}_spelled[lazy]: TEXT {_text(marker)}\n"
    found = special(marker, token_id)
    return f"{rule}: {rule}_spelled{'' if found is None else f' | TEXT {found}'}\n{spelled}"


def marker_of(text: str, token_id: TokenId) -> str:
    """Marker in a grammar, as an added token or as a text."""
    found = special(text, token_id)
    return _text(text) if found is None else f"({found} | {_text(text)})"


def special(text: str, token_id: TokenId) -> str | None:
    """Added token in a grammar; None if there is none of this text."""
    found = token_id(text)
    return None if found is None else f"<[{found}]>"


def _any_of(parts: Sequence[str]) -> str:
    return " | ".join(parts)


def _text(text: str) -> str:
    """A text of Lark."""
    return json.dumps(text, ensure_ascii=False)


_FORMS: dict[str, Callable[[Sequence[_Tool], TokenId, str], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "openai": _harmony,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
}
