"""Input of ``/v1/responses``: items, as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import InvalidRequestError, OutriderError

JsonObject = dict[str, Any]
_RENAMED = (
    ("prompt_token_ids", "input"),
    ("prompt", "input"),
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("json_schema", "text.format.schema"),
    ("reasoning_effort", "reasoning.effort"),
    ("logprobs", "top_logprobs"),
)
"""Fields of chats and of the SDK, and the ones of the Responses API that they come from; the first that fits."""


class Conversation:
    """Messages of a chat, and the input items that they come from."""

    def __init__(self, given: str | Sequence[JsonObject], instructions: str | None = None) -> None:
        """``InvalidRequestError`` names the first item that is not supported."""
        self.messages: list[JsonObject] = []
        self._origins: list[str] = []
        if instructions:
            self._append("instructions", {"role": "system", "content": instructions})
        if isinstance(given, str):
            self._append("input", {"role": "user", "content": given})
            return
        for index, item in enumerate(given):
            self._add(f"input[{index}]", item)

    def translated(self, error: OutriderError) -> OutriderError:
        """An error of a chat with the field names of the Responses API."""
        if not isinstance(error, InvalidRequestError):
            return error
        return InvalidRequestError(self._own_name(error.field), error.problem)

    def _own_name(self, field: str) -> str:
        for index, origin in enumerate(self._origins):
            if field.startswith(f"messages[{index}]"):
                return field.replace(f"messages[{index}]", origin, 1)
        for theirs, own in _RENAMED:
            if field == theirs or field.startswith((f"{theirs}.", f"{theirs}[")):
                return own + field[len(theirs) :]
        return field.replace("].function", "]", 1) if field.startswith("tools[") else field

    def _append(self, origin: str, message: JsonObject) -> None:
        self.messages.append(message)
        self._origins.append(origin)

    def _add(self, path: str, item: JsonObject) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._add_message(path, item)
        elif kind == "reasoning":
            self._append(path, {"role": "assistant", "content": None, "reasoning_content": _reasoning_text(path, item)})
        elif kind == "function_call":
            self._add_call(path, item)
        elif kind == "function_call_output":
            call_id = _text(path, item, "call_id")
            self._append(path, {"role": "tool", "tool_call_id": call_id, "content": item.get("output")})
        else:
            known = "message, reasoning, function_call or function_call_output"
            raise InvalidRequestError(f"{path}.type", f"must be {known}, not {kind!r}")

    def _add_message(self, path: str, item: JsonObject) -> None:
        message = {"role": item.get("role"), "content": item.get("content")}
        last = self.messages[-1] if self.messages else {}
        follows_reasoning = "reasoning_content" in last and last["content"] is None and "tool_calls" not in last
        if message["role"] == "assistant" and follows_reasoning:
            last["content"] = message["content"]
        else:
            self._append(path, message)

    def _add_call(self, path: str, item: JsonObject) -> None:
        """The calls of one turn belong to one message of the assistant."""
        if not self.messages or self.messages[-1].get("role") != "assistant":
            self._append(path, {"role": "assistant", "content": None})
        function = {name: _text(path, item, name) for name in ("name", "arguments")}
        call = {"id": _text(path, item, "call_id"), "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _text(path: str, item: JsonObject, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path}.{name}", "must be a text")
    return value


def _reasoning_text(path: str, item: JsonObject) -> str:
    """Text of the reasoning, or of its summary where only that was kept."""
    for name in ("content", "summary"):
        parts = item.get(name) or ()
        if not isinstance(parts, list | tuple) or not all(isinstance(part, dict) for part in parts):
            raise InvalidRequestError(f"{path}.{name}", "must be a list of parts with a text")
        if parts:
            return "\n".join(str(part.get("text", "")) for part in parts)
    return ""
