"""Chat prompts: messages, tools and template options, as plain values.

Owns the valid content of a chat prompt; ``outrider.tokenization.chat`` renders it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.limits import Bound

MAX_MESSAGES = Bound(16_384, "messages")
MAX_TOOLS = Bound(1_024, "tools")
MAX_DOCUMENTS = Bound(4_096, "documents")
_MAX_DEPTH = 64
"""Lists and objects within one another; a message of tool calls has about six."""
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template. Entries are JSON values."""

    messages: tuple[Mapping[str, Any], ...]
    """Oldest first, each with a ``role``, as OpenAI's API and transformers have them."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """JSON schemas of functions that the template may tell the model of."""
    documents: tuple[Mapping[str, Any], ...] | None = None
    """Documents for templates that know retrieval."""
    chat_template: str = ""
    """Name of one of the model's templates. Empty: ``tool_use`` with tools where there is one, else ``default``."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    add_generation_prompt: bool = True
    """End with the header of the assistant's next message."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model continues it. Not together with ``add_generation_prompt``."""


def check_chat(chat: ChatPrompt) -> None:
    """Raise ``InvalidRequestError`` for the first entry that no template could use."""
    if not chat.messages:
        raise InvalidRequestError("messages", "must hold at least one message")
    MAX_MESSAGES.check("messages", len(chat.messages))
    for index, message in enumerate(chat.messages):
        _check_message(f"messages[{index}]", message)
    _check_objects("tools", chat.tools, MAX_TOOLS)
    _check_objects("documents", chat.documents, MAX_DOCUMENTS)
    _check_object("chat_template_kwargs", chat.template_kwargs)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message",
            "cannot be set together with add_generation_prompt: one continues the last message",
        )


def _check_message(field_name: str, message: object) -> None:
    _check_object(field_name, message)
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{field_name}.role", f"must be a text such as 'user', not {role!r}")


def _check_objects(field_name: str, entries: tuple[Mapping[str, Any], ...] | None, bound: Bound) -> None:
    bound.check(field_name, len(entries or ()))
    for index, entry in enumerate(entries or ()):
        _check_object(f"{field_name}[{index}]", entry)


def _check_object(field_name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field_name, f"must be an object with names and values, not {type(value).__name__}")
    _check_json(field_name, value, _MAX_DEPTH)


def _check_json(field_name: str, value: object, depth: int) -> None:
    """A template sees nothing but JSON: an object of another type would bring its methods into the sandbox."""
    if depth == 0:
        raise InvalidRequestError(field_name, f"holds lists and objects more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequestError(field_name, "holds an object with a name that is no text")
        value = value.values()
    elif not isinstance(value, list | tuple):
        if type(value) not in _SCALARS:
            raise InvalidRequestError(field_name, f"must hold JSON values alone, not {type(value).__name__}")
        return
    for entry in value:
        _check_json(field_name, entry, depth - 1)
