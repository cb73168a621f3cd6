"""Conversion of OpenAI messages for chat templates.

As in vLLM: content that is a list of text parts is joined if the template does not loop over parts, content that is
null or absent is the empty text. Arguments of tool calls become objects, or JSON text where the template joins them
with other text. Parts that are not text are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from outrider.errors import InvalidRequestError
from outrider.tokenization.chat.sandbox import parse_template

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Two names of the same field; templates use either."""
_JOINED_DESCRIPTION = re.compile(r"\+\s*(tool|function)(\.function)?\.description\b")
_FORM_TESTS = ("string", "mapping")
_TEXT_FILTERS = ("string", "trim", "safe", "e", "escape", "replace", "indent")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHOWN_CHARACTERS = 80
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def prepare_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Copies of the messages in the form of the template; ``InvalidRequestError`` names an unsupported part."""
    takes_parts, no_content = loops_over_content(template), None if tests_content_for_none(template) else ""
    joins_arguments = wants_text_arguments(template)
    for index, message in enumerate(messages):
        _check_role(f"messages[{index}].role", message.get("role"), template)
    found = [
        _prepare(f"messages[{index}]", message, takes_parts=takes_parts, joins_arguments=joins_arguments)
        for index, message in enumerate(messages)
    ]
    prepared = [{**message, "content": message.get("content", no_content)} for message in found]
    return prepared if "developer" in template else list(map(_without_developer, prepared))


def prepare_tools(tools: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Tools in the form of the template: gpt-oss's joins descriptions with text, which tools may lack."""
    if _JOINED_DESCRIPTION.search(template) is None:
        return list(tools)
    return list(map(_described, tools))


@lru_cache(maxsize=64)
def loops_over_content(template: str) -> bool:
    """True if a template has a loop over the parts of a message's content."""
    try:
        tree = parse_template(template)
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


@lru_cache(maxsize=64)
def tests_content_for_none(template: str) -> bool:
    """True if a template has a test such as ``message.content is none``: DeepSeek's finds calls of tools by it."""
    try:
        tree = parse_template(template)
    except jinja2.TemplateError:
        return False
    return any(test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test))


@lru_cache(maxsize=64)
def wants_text_arguments(template: str) -> bool:
    """True if a template joins arguments of tool calls with text, as DeepSeek-R1's distilled models do, and has no test
    such as ``arguments is string`` by which it would take either form.
    """
    try:
        tree = parse_template(template)
    except jinja2.TemplateError:
        return False
    names = {"arguments"} | {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_arguments(assignment.node, {"arguments"})
    }
    if any(_is_arguments(test.node, names) and test.name in _FORM_TESTS for test in tree.find_all(nodes.Test)):
        return False
    return any(_is_arguments(part, names) for part in _parts_of_text(tree))


def _parts_of_text(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Expressions that are printed, or joined to other text."""
    for output in tree.find_all(nodes.Output):
        yield from output.nodes
    for joined in tree.find_all(nodes.Concat):
        yield from joined.nodes
    for added in tree.find_all(nodes.Add):
        yield from (added.left, added.right)


def _is_arguments(node: nodes.Node | None, names: Collection[str]) -> bool:
    """``call.arguments``, ``call['function']['arguments']`` and names that hold it, as text by a filter or not."""
    if isinstance(node, nodes.Filter):
        return node.name in _TEXT_FILTERS and _is_arguments(node.node, names)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    return isinstance(node, nodes.Name) and node.name in names


def _is_content(node: nodes.Node) -> bool:
    """``content``, ``message.content`` and ``message['content']``, filtered or cut."""
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _prepare(field: str, message: Mapping[str, Any], *, takes_parts: bool, joins_arguments: bool) -> dict[str, Any]:
    # Clients send null for absent fields; templates test for their presence.
    kept = {name: value for name, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list | tuple):
        parts = [_text_part(f"{field}.content[{index}]", part) for index, part in enumerate(kept["content"])]
        kept["content"] = parts if takes_parts else "\n".join(part["text"] for part in parts)
    if isinstance(kept.get("tool_calls"), list | tuple):
        form = _argument_text if joins_arguments else _arguments
        kept["tool_calls"] = [_tool_call(call, form) for call in kept["tool_calls"]]
    reasoning = next((kept[name] for name in _REASONING_FIELDS if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _check_role(field: str, role: object, template: str) -> None:
    """Raise ``InvalidRequestError`` for a role that neither the API nor the template knows."""
    if role not in _ROLES and not (isinstance(role, str) and f"'{role}'" in template.replace('"', "'")):
        known = f"{', '.join(_ROLES)}, or one that the template names"
        raise InvalidRequestError(field, f"must be one of {known}, not {str(role)[:_SHOWN_CHARACTERS]!r}")


def _text_part(field: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text", part.get(kind)) if isinstance(part, Mapping) and isinstance(kind, str) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise InvalidRequestError(field, f"must be a part of type text with its text, not {kind!r}: only text is read")
    return {"type": "text", "text": text}


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    given = tool.get("function")
    return {**tool, "function": {"description": "", **given}} if isinstance(given, Mapping) else tool


def _tool_call(call: object, form: Callable[[object], object]) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": form(function.get("arguments"))}}


def _argument_text(given: object) -> str:
    """The arguments of a call as JSON text: as the client sent them, if that is text."""
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)


def _arguments(given: object) -> object:
    """The arguments of a call as an object; an empty one for what a model wrote that is no JSON object. Clients send it
    back with each turn, and a refusal would end the conversation.
    """
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name of the system message, for templates that know the older one."""
    return {**message, "role": "system"} if message["role"] == "developer" else message
