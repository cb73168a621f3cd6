"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from outrider.chat import ChatPrompt
from outrider.errors import InvalidRequestError
from outrider.gateway.protocol.fields import GenerationFields, MaxTokens
from outrider.gateway.protocol.grammars import GrammarField
from outrider.gateway.protocol.tool_grammars import arguments_schema, calls_schema, check_tools, chosen_tool

JsonObject = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)


class ChatFields(GenerationFields):
    """Input of the chat template."""

    input_fields: ClassVar[tuple[str, ...]] = ("messages", "tools", "documents", "chat_template_kwargs")

    messages: list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    documents: list[JsonObject] | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    """True, unless the last message is continued."""
    continue_final_message: bool | None = None

    @property
    def chat(self) -> ChatPrompt:
        """The conversation."""
        continues = bool(self.continue_final_message)
        adds = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return ChatPrompt(
            messages=tuple(self.messages or ()),
            tools=tuple(self.tools) if self.tools else None,
            documents=None if self.documents is None else tuple(self.documents),
            chat_template=self.chat_template or "",
            template_kwargs=self._template_kwargs(),
            add_generation_prompt=adds,
            continue_final_message=continues,
        )

    def _template_kwargs(self) -> JsonObject:
        effort = self.reasoning_effort
        # As in vLLM: templates know a switch where the API knows degrees.
        extra = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {**extra, **(self.chat_template_kwargs or {})}


class ChatCompletionRequest(ChatFields):
    """A request for the assistant's next message."""

    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    """False: the calls of an answer after its first are left out."""
    include_reasoning: bool | None = None
    """False: the reasoning of an answer is left out."""
    echo: bool | None = None
    """Begin with the last message where that is the assistant's."""

    @property
    def wanted_tokens(self) -> int | None:
        """Maximum number of output tokens; None: the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_field(self) -> str:
        """The field that ``wanted_tokens`` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of most likely tokens in the logprobs; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def enforced_call(self) -> str | None:
        """Name of the tool that must be called; empty: any; None: none must."""
        return "" if self.tool_choice == "required" else chosen_tool(self.tool_choice)

    @property
    def grammar(self) -> GrammarField | None:
        """Grammar of the output: the calls that must be made, or as in completions."""
        found, name = super().grammar, self.enforced_call
        if name is None:
            return found
        if found is not None:
            raise InvalidRequestError(found.field, "cannot be set together with a tool_choice that enforces a call")
        if name:
            return GrammarField("tool_choice", "json_schema", arguments_schema(self.tools or (), name))
        schema = calls_schema(self.tools or (), is_parallel=self.parallel_tool_calls is not False)
        return GrammarField("tool_choice", "json_schema", schema)

    @property
    def parses_tools(self) -> bool:
        """True if the output may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def role(self) -> str:
        """The role of the generated message."""
        chat = self.chat
        return "assistant" if chat.add_generation_prompt else str(chat.messages[-1]["role"])

    @property
    def echoed(self) -> str:
        """Text at the beginning of the response."""
        last = (self.messages or [{}])[-1]
        content = last.get("content")
        return content if self.echo and last.get("role") == self.role and isinstance(content, str) else ""

    def check(self) -> None:
        """Raise ``InvalidRequestError`` for fields that exclude each other."""
        if self.messages is None:
            raise InvalidRequestError("messages", "must be given")
        if self.wanted_tokens == 0:
            raise InvalidRequestError(self.tokens_field, "must be at least 1, not 0")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        check_tools(self.tools or ())
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("none", "auto", "required"):
            raise InvalidRequestError("tool_choice", "must be none, auto, required, or an object that names a tool")
        if self.tool_choice == "auto" and self.tools is None:
            raise InvalidRequestError("tool_choice", "needs tools")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidRequestError("tool_choice", "needs tools")
