"""``chat.proto``: conversations. Data without a fixed structure is JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.chat import ChatPrompt, check_chat
from outrider.cooperative import Work, run
from outrider.errors import InvalidRequestError
from outrider.limits.bounded_json import checks_of_json, parse_json
from outrider.v1 import chat_pb2 as pb

_SLICE_CHARACTERS = 1 << 16
_ENTRY_CHARACTERS = 256
"""Cost of an entry in characters, however short it is."""


def chat_to_proto(chat: ChatPrompt) -> pb.Chat:
    """A conversation; ``InvalidRequestError`` if it cannot be JSON."""
    check_chat(chat)
    return pb.Chat(
        messages=[_message_to_proto(message) for message in chat.messages],
        tools_json=_all_to_json(chat.tools),
        documents_json=_all_to_json(chat.documents),
        chat_template=chat.chat_template,
        template_kwargs_json=_to_json(chat.template_kwargs),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        has_tools=chat.tools is not None,
        has_documents=chat.documents is not None,
    )


def chat_from_proto(message: pb.Chat) -> ChatPrompt:
    """A received conversation; ``InvalidRequestError`` for invalid JSON, or more of it than is parsed."""
    return run(chat_reading(message))


def chat_reading(message: pb.Chat) -> Work[ChatPrompt]:
    """``chat_from_proto`` with pauses."""
    continues = message.continue_final_message
    adds = message.add_generation_prompt if message.HasField("add_generation_prompt") else not continues
    fields = [found.fields_json for found in message.messages]
    texts = {"messages": fields, "tools": message.tools_json, "documents": message.documents_json}
    for field, found in texts.items():
        yield from checks_of_json(field, map(str.encode, found))
    yield from checks_of_json("chat_template_kwargs", [message.template_kwargs_json.encode()])
    rest = yield from _all_from_json("messages", fields)
    tools = yield from _all_from_json("tools", message.tools_json)
    documents = yield from _all_from_json("documents", message.documents_json)
    return ChatPrompt(
        messages=tuple(map(_message_from_proto, message.messages, rest)),
        tools=tools if message.has_tools or tools else None,
        documents=documents if message.has_documents or documents else None,
        chat_template=message.chat_template,
        template_kwargs=_from_json("chat_template_kwargs", message.template_kwargs_json),
        add_generation_prompt=adds,
        continue_final_message=continues,
    )


def _message_to_proto(message: Mapping[str, Any]) -> pb.ChatMessage:
    rest = {name: value for name, value in message.items() if name != "role"}
    content = rest.pop("content") if isinstance(rest.get("content"), str) else None
    return pb.ChatMessage(role=message["role"], content=content, fields_json=_to_json(rest))


def _message_from_proto(message: pb.ChatMessage, rest: Mapping[str, Any]) -> dict[str, Any]:
    content = {"content": message.content} if message.HasField("content") else {}
    return {"role": message.role, **content, **rest}


def _all_to_json(entries: Iterable[Mapping[str, Any]] | None) -> list[str]:
    return [json.dumps(_plain(entry), ensure_ascii=False) for entry in entries or ()]


def _all_from_json(field: str, entries: Iterable[str]) -> Work[tuple[dict[str, Any], ...]]:
    found, num_read = [], 0
    for index, entry in enumerate(entries):
        num_read += len(entry) + _ENTRY_CHARACTERS
        if num_read > _SLICE_CHARACTERS:
            num_read = 0
            yield
        found.append(_from_json(f"{field}[{index}]", entry))
    return tuple(found)


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(_plain(value), ensure_ascii=False) if value else ""


def _from_json(field: str, text: str) -> dict[str, Any]:
    try:
        found = parse_json(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequestError(field, "must be a JSON object")
    return found


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Mappings other than dictionaries are none to the json module."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
