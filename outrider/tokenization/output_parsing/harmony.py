"""Messages on channels, each ``<|channel|>NAME ... <|message|>TEXT<|end|>``: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    split_at,
)
from outrider.tokenization.output_parsing.json_calls import HeldTextParser, JsonValue

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."


class HarmonyParser(HeldTextParser):
    """Parser of one output: ``analysis`` is reasoning, a message to a function is a call, all other text is content."""

    def __init__(self) -> None:
        super().__init__()
        self._is_header = True
        self._is_first = True
        """No message has begun."""
        self._kind: type[Content] | type[Reasoning] | type[CallArguments] = Content
        """Kind of the current message's text."""
        self._ended: object = None
        """Kind of the last message with text."""
        self._is_fresh = False
        """The message has no text yet."""
        self._object: JsonValue | None = None
        """Arguments of the current call, if they are an object."""

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back. A text without any header is content."""
        yield from super().finish()
        if self._is_header and self._is_first and self._held:
            yield Content(self._held)

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        while self._held:
            if self._is_header:
                header, marker, rest = self._held.partition(_MESSAGE)
                if not marker:
                    return
                self._held, self._is_header, self._is_first, self._is_fresh = rest, False, False, True
                yield from self._begin(header)
                continue
            if self._kind is CallArguments and self._is_fresh:
                if not (begun := self._held.lstrip()) and not is_final:
                    return
                self._object = JsonValue() if begun.startswith("{") else None
            if self._object is not None and not self._object.is_done:
                # Its texts may have markers in them.
                count = self._object.push(self._held)
                text, self._held = self._held[:count], self._held[count:]
                yield from self._text(text)
                continue
            text, marker, self._held = split_at(self._held, _ENDS, is_final=is_final)
            if text and self._object is None:
                yield from self._text(text)
            if not marker:
                return
            self._is_header, self._object = True, None

    def _begin(self, header: str) -> Iterator[Event]:
        recipient, channel = _RECIPIENT.search(header), _NAME.search(header)
        to = recipient.group(1) if recipient else ""
        if to.startswith(_FUNCTIONS):
            self._kind = CallArguments
            yield CallStart(to.removeprefix(_FUNCTIONS))
        elif to or (channel is not None and channel.group(1) == "analysis"):
            self._kind = Reasoning  # a built-in tool's input is no answer either
        else:
            self._kind = Content

    def _text(self, text: str) -> Iterator[Event]:
        if self._is_fresh and self._kind is self._ended and self._kind is not CallArguments:
            text = "\n" + text
        self._is_fresh, self._ended = False, self._kind
        yield self._kind(text)
