"""``POST /v1/responses``: a chat request in the words of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from outrider.errors import InvalidRequestError
from outrider.gateway.protocol.chat import EFFORTS, ChatCompletionRequest, JsonObject
from outrider.gateway.protocol.fields import GenerationFields, MaxTokens
from outrider.gateway.protocol.response_input import Conversation

_LOGPROBS = "message.output_text.logprobs"
_NOT_STORED = "cannot be used, since responses are not stored; send the whole conversation as input"
_STORED = ("previous_response_id", "conversation", "prompt")
_OF_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chats, and what they are called here."""


class ResponsesRequest(GenerationFields):
    """A request for a response. The fields of ``GenerationFields`` that OpenAI's API lacks are extensions."""

    input_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: MaxTokens | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    """Format of the output."""
    reasoning: JsonObject | None = None
    """``effort``."""
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: JsonObject | None = None
    metadata: JsonObject | None = None
    """Returned with the response."""
    user: str | None = None
    store: bool | None = None
    """No effect: the response says that it is not stored."""
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None

    @property
    def includes_logprobs(self) -> bool:
        """True if the output text has logprobs."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def format(self) -> JsonObject:
        """Format of the output text."""
        found = (self.text or {}).get("format")
        return found if isinstance(found, dict) else {"type": "text"}

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ``InvalidRequestError`` for a field that is not supported. ``given``: the body."""
        if self.input is None:
            raise InvalidRequestError("input", "must be given")
        for name in _STORED:
            if getattr(self, name) is not None:
                raise InvalidRequestError(name, _NOT_STORED)
        for name, own in _OF_CHATS.items():
            if given.get(name) is not None:
                raise InvalidRequestError(name, f"is a field of /v1/chat/completions; here it is {own}")
        if self.num_choices > 1:
            raise InvalidRequestError("n", "must be 1: a response is one")
        if self.background:
            raise InvalidRequestError("background", "must be false, since responses are not stored")
        if (effort := (self.reasoning or {}).get("effort")) is not None and effort not in EFFORTS:
            raise InvalidRequestError("reasoning.effort", f"must be one of {', '.join(EFFORTS)}")
        if self.truncation not in (None, "disabled"):
            raise InvalidRequestError("truncation", "must be disabled: an input that is too long is refused")

    def as_chat(self, conversation: Conversation) -> ChatCompletionRequest:
        """The request for the same output as a chat; ``InvalidRequestError`` in its words."""
        shared = {name: getattr(self, name) for name in GenerationFields.model_fields}
        own = {
            "messages": conversation.messages,
            "tools": None if self.tools is None else _chat_tools(self.tools),
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _chat_format(self.format),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.includes_logprobs or None,
            "top_logprobs": self.top_logprobs,
        }
        return ChatCompletionRequest.model_construct(**{**shared, **own})


def _chat_tools(tools: list[JsonObject]) -> list[JsonObject]:
    found = []
    for index, tool in enumerate(tools):
        if (kind := tool.get("type")) != "function":
            raise InvalidRequestError(f"tools[{index}].type", f"must be function, not {kind!r}")
        if not isinstance(tool.get("name"), str):
            raise InvalidRequestError(f"tools[{index}].name", "must be the name of the function")
        found.append({"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}})
    return found


def _chat_tool_choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequestError("tool_choice", 'must be none, auto, required or {"type": "function", "name": NAME}')
    return {"type": "function", "function": {"name": choice["name"]}}


def _chat_format(given: JsonObject) -> JsonObject:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}
