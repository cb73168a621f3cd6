"""Chat renderer: from a chat prompt to the prompt text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from outrider.chat import ChatPrompt, check_chat, plain
from outrider.errors import InvalidRequestError
from outrider.limits import PROMPT_CHARACTERS
from outrider.tokenization.chat.messages import prepare_messages, prepare_tools
from outrider.tokenization.chat.sandbox import compile_template
from outrider.tokenization.chat.templates import ChatTemplates

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Inserted after the message that is continued; the text after it is cut off. The blank at its end shows whether the
template trims messages.
"""


class ChatRenderer:
    """Renders chats with the templates of one model. Thread-safe."""

    def __init__(self, templates: ChatTemplates) -> None:
        self.templates = templates

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatRenderer:
        """Renderer from the files of a model's folder."""
        return cls(ChatTemplates.from_files(files))

    @property
    def template_names(self) -> tuple[str, ...]:
        """Names of the templates; empty for a model without templates."""
        return tuple(self.templates.sources)

    def check_template(self, chat: ChatPrompt) -> None:
        """Raise ``InvalidRequestError`` if the model has no template for a chat, which is not read."""
        self._choose(chat)

    def template_of(self, chat: ChatPrompt) -> str:
        """Source of the template of a chat; ``InvalidRequestError`` if the model has none."""
        return self._choose(chat)

    def name_of_template(self, chat: ChatPrompt) -> str:
        """Name of the template of a chat."""
        return self.templates.name_of(chat.chat_template, has_tools=bool(chat.tools))

    def render(self, chat: ChatPrompt) -> str:
        """Render the prompt, special tokens included; ``InvalidRequestError`` names what cannot be rendered.

        A template may take any time and memory: servers render with ``ChatRendering``.
        """
        check_chat(chat)
        template = self._choose(chat)
        messages = prepare_messages(chat.messages, template)
        final = _mark_final(chat, messages, template) if chat.continue_final_message else ""
        text = self._render(template, chat, messages)
        if chat.continue_final_message:
            text = _cut_at_mark(text, final)
        PROMPT_CHARACTERS.check("messages", len(text))
        _check_encodable(text)
        return text

    def _choose(self, chat: ChatPrompt) -> str:
        return self.templates.choose(chat.chat_template, has_tools=bool(chat.tools))

    def _render(self, template: str, chat: ChatPrompt, messages: list[dict[str, Any]]) -> str:
        name = self.name_of_template(chat)
        variables = {**self.templates.special_tokens, **plain(chat.template_kwargs)}
        try:
            # As one object: any name is a variable, also "self".
            return compile_template(template).render(
                {
                    **variables,
                    "messages": plain(messages),
                    "tools": plain(prepare_tools(chat.tools, template)) if chat.tools else None,
                    "documents": None if chat.documents is None else plain(chat.documents),
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError("messages", f"are refused by the chat template {name}: {error}") from error
        except MemoryError:
            raise InvalidRequestError("messages", f"take too much memory in the chat template {name}") from None
        except Exception as error:  # a template is code: whatever it does wrong, it does with these messages
            raise InvalidRequestError(
                "messages", f"cannot be rendered by the chat template {name}: {type(error).__name__}: {error}"
            ) from error


def _mark_final(chat: ChatPrompt, messages: list[dict[str, Any]], template: str) -> str:
    """Mark the end of the last message, or of its last part."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        messages[-1]["content"] = [*content[:-1], {**content[-1], "text": text + _MARK}]
        return text
    if chat.messages[-1].get("content") is None or not isinstance(content, str) or "content" not in template:
        raise InvalidRequestError("continue_final_message", "is set, and the last message has no text to continue")
    messages[-1]["content"] = content + _MARK
    return content


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message", "is set, and the chat template leaves out the end of the last message"
        )
    is_whole = text[at : at + len(_MARK)] == _MARK
    return text[:at] if is_whole else text[:at].rstrip()


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("messages", f"are no Unicode text: {error.reason}") from None
