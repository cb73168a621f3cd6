"""Options of a chat: from keyword arguments to a ``ChatPrompt``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.chat import ChatPrompt
from outrider.errors import InvalidRequestError

CHAT_OPTIONS = (
    *("tools", "documents", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Options that need ``messages``."""


def build_chat(given: Mapping[str, Any]) -> ChatPrompt | None:
    """Build the conversation of a request; None without ``messages``. ``InvalidRequestError`` names a bad option."""
    if "messages" not in given:
        for name in CHAT_OPTIONS:
            if name in given:
                raise InvalidRequestError(name, "is an option of messages, and there are none")
        return None
    continues = _flag("continue_final_message", given, default=False)
    return ChatPrompt(
        messages=_objects("messages", given),
        tools=_objects("tools", given) if "tools" in given else None,
        documents=_objects("documents", given) if "documents" in given else None,
        chat_template=_text("chat_template", given),
        template_kwargs=given.get("chat_template_kwargs", {}),
        add_generation_prompt=_flag("add_generation_prompt", given, default=not continues),
        continue_final_message=continues,
    )


def _objects(name: str, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    value = given[name]
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        example = ' such as {"role": "user", "content": "..."}' if name == "messages" else ""
        raise InvalidRequestError(name, f"must be a list of dictionaries{example}, not {type(value).__name__}")
    return tuple(value)


def _text(name: str, given: Mapping[str, Any]) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise InvalidRequestError(name, f"must be a text, not {type(value).__name__}")
    return value


def _flag(name: str, given: Mapping[str, Any], *, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(name, f"must be True or False, not {value!r}")
    return value
