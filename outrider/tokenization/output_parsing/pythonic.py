"""``[name(key=value, ...), ...]`` as the whole output: Llama 4 and small Llama 3.2 models."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event
from outrider.tokenization.output_parsing.json_calls import HeldTextParser

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]+")
_ARGUMENT = re.compile(r"\s*([^\s=,()\[\]{}'\"*]+)\s*=")
_BLANKS = " \t\r\n"


class PythonicParser(HeldTextParser):
    """Parser of one output. Nothing marks a call but its form, so it is one only if it names a tool of the request.

    Calls are emitted one at a time, when their last bracket has come.
    """

    def __init__(self, is_tool: Callable[[str], bool]) -> None:
        self._is_tool = is_tool
        super().__init__()
        self._form = "begin"
        """Part that is read: begin, calls, end, or content."""
        self._opening = ""
        """Text before the first call, which is content if that cannot be read."""

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back."""
        yield from super().finish()
        if self._held.strip():
            yield Content(self._opening + self._held)

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        if self._form == "begin":
            self._begin(is_final=is_final)
        while self._form == "calls" and (call := self._next_call()):
            yield from call
        if self._form == "end":
            self._end(is_final=is_final)
        if self._form == "content" and self._held:
            text, self._held = self._held, ""
            yield Content(text)

    def _begin(self, *, is_final: bool) -> None:
        text = self._held.lstrip()
        if not is_final and _START.startswith(text):
            return
        text = text.removeprefix(_START).lstrip()
        if not text and not is_final:
            return
        name = _NAME.match(inner := text[1:].lstrip())
        is_list = text.startswith("[")
        if is_list and not inner and not is_final:
            return
        if not is_list or name is None:
            self._form = "content"
        elif (rest := inner[name.end() :].lstrip()) or is_final:
            is_call = rest.startswith("(") and self._is_tool(name.group())
            self._opening = self._held[: -len(inner)]
            self._form, self._held = ("calls", inner) if is_call else ("content", self._held)

    def _end(self, *, is_final: bool) -> None:
        text = self._held.lstrip()
        if is_final or text.startswith(_END) or not _END.startswith(text):
            self._form, self._held = "content", text.removeprefix(_END)

    def _next_call(self) -> list[Event]:
        """Events of the next call, if it is complete."""
        text = self._held.lstrip(_BLANKS + ",")
        if text.startswith("]"):
            self._form, self._held = "end", text[1:]
            return []
        end = _end_of_call(text)
        if end is None:
            return []
        call, self._held = text[:end], text[end:]
        name, arguments = _parse(call)
        if name is None or not self._is_tool(name):
            self._form, self._held = "content", self._opening + text
            return []
        self._opening = ""
        return [CallStart(name), CallArguments(arguments)]


def _end_of_call(text: str) -> int | None:
    """Length of the call that a text begins with; None while it is incomplete."""
    return next((place + 1 for place, character, depth in _marks(text) if character in ")]}" and depth <= 0), None)


def _marks(text: str) -> Iterator[tuple[int, str, int]]:
    """Places of brackets and commas outside of quotes, each with the depth after it."""
    depth, quote, is_escaped = 0, "", False
    for place, character in enumerate(text):
        if quote:
            is_ended = character == quote and not is_escaped
            is_escaped = character == "\\" and not is_escaped
            quote = "" if is_ended else quote
        elif character in "'\"":
            quote = character
        elif character in "([{)]},":
            depth += (character in "([{") - (character in ")]}")
            yield place, character, depth


def _parse(call: str) -> tuple[str | None, str]:
    """Name and arguments (JSON) of a call; no name for what cannot be read."""
    call = call.strip()
    if (name := _NAME.match(call)) is None:
        return None, ""
    call, names = _renamed(f"_{call[name.end() :]}")
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            return None, ""
        if tree.args or len(set(names.values())) < len(tree.keywords):
            return None, ""
        values = {names[keyword.arg or ""]: _literal(keyword.value) for keyword in tree.keywords}
        return name.group(), json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (KeyError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None, ""


def _renamed(call: str) -> tuple[str, dict[str, str]]:
    """The call with other names of its arguments, and the given ones by these: some, such as ``from``, are not names in
    Python.
    """
    names: dict[str, str] = {}
    parts, end = list[str](), 0
    for place, character, depth in _marks(call):
        if character in "(," and depth == 1 and (found := _ARGUMENT.match(call, place + 1)):
            name = f"_{len(names)}"
            names[name] = found.group(1)
            parts += [call[end : found.start(1)], name]
            end = found.end(1)
    return "".join([*parts, call[end:]]), names


def is_argument_name(name: str) -> bool:
    """True if a call with such an argument can be read."""
    found = _ARGUMENT.fullmatch(f"{name}=")
    return found is not None and found.group(1) == name


def _literal(node: ast.expr) -> object:
    """The value of a literal; JSON's words for constants too."""
    if isinstance(node, ast.Name):
        words = {"true": True, "false": False, "null": None}
        if node.id not in words:
            raise ValueError(node.id)
        return words[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(ast.literal_eval(key or node)): _literal(value) for key, value in pairs}
    return ast.literal_eval(node)
