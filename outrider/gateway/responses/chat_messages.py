"""Message of a chat response: content, reasoning and tool calls, whole or as the deltas of a stream."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from typing import Any

from outrider.tokenization.output_parsing import (
    CallArguments,
    CallStart,
    Event,
    OutputFormat,
    OutputParser,
    Reasoning,
)

Json = dict[str, Any]
_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Two names of one field: older clients of vLLM read the first, newer ones the second."""
_CALL_ID_LENGTH = 24
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Form in which the outputs of one request become messages."""

    format: OutputFormat
    tools: tuple[Json, ...] = ()
    enforced_call: str | None = None
    """Name of the tool whose arguments are the output; empty: the output is a list of calls; None: it is neither."""
    prompt_end: str = ""
    """End of the rendered prompt, which may have begun the reasoning."""
    includes_reasoning: bool = True
    max_calls: int | None = None
    """Calls past these are dropped."""
    has_grammar: bool = False

    def make_parser(self) -> OutputParser | None:
        """A parser for one output; None if nothing is parsed."""
        if self.enforced_call is None:
            return self.format.make_parser(self.tools, self.prompt_end, has_grammar=self.has_grammar)
        return self.format.enforced_parser(self.enforced_call, self.prompt_end)

    def make_call_id(self) -> str:
        """An id for a call, as the model's template takes it."""
        length = self.format.call_id_length
        prefix = "call_" if length is None else ""
        return prefix + "".join(secrets.choice(_LETTERS) for _ in range(length or _CALL_ID_LENGTH))


class MessageParser:
    """The message of one choice."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._parser = form.make_parser()
        self._num_calls = 0
        self._arguments: list[str] = []
        """Parts of the last call's arguments."""

    @property
    def has_calls(self) -> bool:
        """True if the message has tool calls."""
        return self._num_calls > 0

    @property
    def is_in_call(self) -> bool:
        """True if the arguments of the last call are incomplete."""
        try:
            json.loads("".join(self._arguments) or "{}")
        except ValueError:
            return True
        return False

    def push(self, text: str, *, is_last: bool) -> Json:
        """The delta of the next part of the output; empty while nothing of it is final."""
        if self._parser is None:
            return {"content": text} if text else {}
        delta: Json = {}
        for event in self._parser.push(text):
            self._add(delta, event)
        for event in self._parser.finish() if is_last else ():
            self._add(delta, event)
        return delta

    def whole(self, text: str) -> Json:
        """The message of a whole output."""
        delta = self.push(text, is_last=True)
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())
        ]
        is_empty = self._parser is not None and (calls or any(name in delta for name in _REASONING_FIELDS))
        message: Json = {"content": delta.get("content", None if is_empty else "")}
        message |= {name: delta[name] for name in _REASONING_FIELDS if name in delta}
        return message | {"tool_calls": calls} if calls else message

    def _add(self, delta: Json, event: Event) -> None:
        if isinstance(event, CallStart | CallArguments):
            self._add_call(delta, event)
        elif not isinstance(event, Reasoning):
            delta["content"] = delta.get("content", "") + event.text
        elif self._form.includes_reasoning:
            for name in _REASONING_FIELDS:
                delta[name] = delta.get(name, "") + event.text

    def _add_call(self, delta: Json, event: CallStart | CallArguments) -> None:
        self._num_calls += isinstance(event, CallStart)
        index, most = self._num_calls - 1, self._form.max_calls
        if most is not None and index >= most:
            return
        calls = delta.setdefault("tool_calls", [])
        if isinstance(event, CallStart):
            self._arguments = []
            function = {"name": event.name, "arguments": ""}
            calls.append({"index": index, "id": self._form.make_call_id(), "type": "function", "function": function})
            return
        self._arguments.append(event.text)
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += event.text
        else:
            calls.append({"index": index, "function": {"arguments": event.text}})
