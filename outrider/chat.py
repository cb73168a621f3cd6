"""Chat prompts: messages, tools and template options, as plain values.

Owns the valid content of a chat prompt; ``outrider.tokenization.chat`` renders it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.cooperative import SLICE_ENTRIES, Work, run, slices_of
from outrider.errors import InvalidRequestError
from outrider.limits import JSON_VALUES, Bound

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

    def plain(self) -> ChatPrompt:
        """The chat made of dictionaries and lists, as another process can take it."""
        entries = {name: plain(getattr(self, name)) for name in ("messages", "tools", "documents", "template_kwargs")}
        return replace(self, **entries)


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """A copy made of dictionaries and lists, from any mappings and sequences."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def check_chat(chat: ChatPrompt) -> None:
    """Raise ``InvalidRequestError`` for the first entry that no template could use."""
    run(checks_of_chat(chat))


def checks_of_chat(chat: ChatPrompt) -> Work[None]:
    """``check_chat`` with pauses."""
    if not chat.messages:
        raise InvalidRequestError("messages", "must hold at least one message")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message",
            "cannot be set together with add_generation_prompt: one continues the last message",
        )
    MAX_MESSAGES.check("messages", len(chat.messages))
    MAX_TOOLS.check("tools", len(chat.tools or ()))
    MAX_DOCUMENTS.check("documents", len(chat.documents or ()))
    for index, message in enumerate(chat.messages):
        _check_message(f"messages[{index}]", message)
    yield from _checks_of_objects(chat)


def _check_message(field_name: str, message: Mapping[str, Any]) -> None:
    _check_object(field_name, message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        shown = repr(role) if role is None or role == "" else type(role).__name__
        raise InvalidRequestError(f"{field_name}.role", f"must be a text such as 'user', not {shown}")
    if content is not None and not isinstance(content, str | list | tuple):
        problem = f"must be a text, a list of parts, or null, not {type(content).__name__}"
        raise InvalidRequestError(f"{field_name}.content", problem)


def _check_object(field_name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field_name, f"must be an object with names and values, not {type(value).__name__}")


def _checks_of_objects(chat: ChatPrompt) -> Work[None]:
    num_values = 0
    lists = (("messages", chat.messages), ("tools", chat.tools or ()), ("documents", chat.documents or ()))
    named = [(f"{name}[{index}]", entry) for name, entries in lists for index, entry in enumerate(entries)]
    for field_name, value in (*named, ("chat_template_kwargs", chat.template_kwargs)):
        _check_object(field_name, value)
        for count in _values_by_depth(field_name, value):
            if num_values // SLICE_ENTRIES != (num_values + count) // SLICE_ENTRIES:
                yield
            num_values += count
            JSON_VALUES.check(field_name, num_values)


def _values_by_depth(field_name: str, value: object) -> Iterator[int]:
    """Checks an object depth by depth, and gives the numbers of values that it checked.

    A template sees nothing but JSON: an object of another type would bring its methods into the sandbox.
    """
    found = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[object] = []
        for part in slices_of(found):
            for entry in part:
                inner += _entries(field_name, entry)
            yield len(part)
        if not inner:
            return
        found = inner
    raise InvalidRequestError(field_name, f"holds lists and objects more than {_MAX_DEPTH} deep")


def _entries(field_name: str, value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequestError(field_name, "holds an object with a name that is no text")
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if type(value) not in _SCALARS:
        raise InvalidRequestError(field_name, f"must hold JSON values alone, not {type(value).__name__}")
    return ()
