"""Incremental readers of JSON: a value, a tool call as an object with a name and arguments, and a parser that holds
text back until it is known whether it is a call.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event

_ARGUMENTS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class JsonValue:
    """Finds the end of one JSON value, which may be malformed."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False
        self._is_scalar: bool | None = None

    def push(self, text: str) -> int:
        """Number of characters that belong to the value."""
        for position, character in enumerate(text):
            if self._ends_before(character):
                self.is_done = True
                return position
            self._take(character)
            if self.is_done:
                return position + 1
        return len(text)

    def _ends_before(self, character: str) -> bool:
        if self._is_in_text:
            return False
        # Outside of a text, a value has no tags: the call is malformed and ends.
        return character == "<" or (bool(self._is_scalar) and character in ",]}" + _BLANKS)

    def _take(self, character: str) -> None:
        if self._is_in_text:
            self._take_in_text(character)
            return
        if character == '"':
            self._is_in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
        if self._is_scalar is None and character not in _BLANKS:
            self._is_scalar = character not in '"{['

    def _take_in_text(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_text = False
            self.is_done = self._depth == 0


class ArgumentsReader:
    """Passes on the JSON text of a call's arguments; a text that contains an object is unwrapped, null is no
    arguments.
    """

    def __init__(self) -> None:
        self._value = JsonValue()
        self._held: str | None = ""
        """Text of a value that is no object; None once it is known to be one."""

    @property
    def is_done(self) -> bool:
        """True if the value has ended."""
        return self._value.is_done

    def push(self, text: str) -> tuple[str, str]:
        """Text of the arguments that is final, and the text after the value."""
        count = self._value.push(text)
        own, rest = text[:count], text[count:]
        if self._held is None:
            return own, rest
        if not self._held and own.startswith("{"):
            self._held = None
            return own, rest
        self._held += own
        return (self.finish() if self.is_done else ""), rest

    def finish(self) -> str:
        """Text that was held back."""
        held, self._held = self._held, ""
        if not held:
            return ""
        try:
            value = json.loads(held)
        except ValueError:
            return held
        if value is None:
            return "{}"
        return value if isinstance(value, str) and value.lstrip().startswith("{") else held


class CallReader:
    """Reads ``{"name": ..., "arguments": {...}}``, where the arguments may also be called ``parameters``.

    The call starts once its name and the beginning of its arguments are known. An object without a name, or with one
    that is not accepted, is no call: ``raw`` is its text.
    """

    def __init__(self, accepts: Callable[[str], bool] = lambda name: True) -> None:
        self.is_done = False
        self.is_call = False
        """True if the call has started."""
        self.raw = ""
        """Text so far, while it is not known to be a call."""
        self._accepts = accepts
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""
        self._depth = 0
        self._key: str | None = None
        self._value: JsonValue | None = None
        """The key or value that is being read, and its text so far; arguments have a reader of their own."""
        self._text = ""
        self._arguments: ArgumentsReader | None = None

    def push(self, text: str) -> tuple[list[Event], str]:
        """Events, and the text after the object."""
        events: list[Event] = []
        while text and not self.is_done:
            before = text
            if self._arguments is not None:
                text = self._read_arguments(self._arguments, text, events)
            elif self._value is not None:
                text = self._read_value(self._value, text, events)
            else:
                text = self._read_between(text, events)
            if not self.is_call:
                self.raw += before[: len(before) - len(text)]
        return events, text

    def finish(self) -> Iterator[Event]:
        """Text that was held back of a call that was cut off."""
        if self.is_call and self._arguments is not None and (held := self._arguments.finish()):
            yield CallArguments(held)

    def _read_between(self, text: str, events: list[Event]) -> str:
        """Outside of keys and values; the first character alone."""
        character = text[0]
        if self._depth == 0:
            self._depth, self.is_done = 1, character != "{"
            return text if self.is_done else text[1:]
        if character in ",:" + _BLANKS:
            return text[1:]
        if character in "<]}":
            self.is_done = True
            if character == "}" and self._early is None:
                self._early = "{}"
            self._start(events)
            return text[1:] if character == "}" else text
        if self._key not in _ARGUMENTS:
            self._value, self._text = JsonValue(), ""
        else:
            self._arguments = ArgumentsReader()
            self._early = self._early or ""
            self._start(events)
        return text

    def _read_arguments(self, reader: ArgumentsReader, text: str, events: list[Event]) -> str:
        found, rest = reader.push(text)
        if not self.is_call:
            self._early = (self._early or "") + found
        elif found:
            events.append(CallArguments(found))
        if reader.is_done:
            self._arguments = self._key = None
        return rest

    def _read_value(self, value: JsonValue, text: str, events: list[Event]) -> str:
        count = value.push(text)
        self._text += text[:count]
        if value.is_done:
            self._value = None
            if self._key is None:
                self._key = _text_of(self._text) or ""
            else:
                if self._key == "name":
                    self._name = _text_of(self._text)
                    self.is_done = self._name is None or not self._accepts(self._name)
                    self._start(events)
                self._key = None
        return text[count:]

    def _start(self, events: list[Event]) -> None:
        if self.is_call or self._name is None or self._early is None or not self._accepts(self._name):
            return
        self.is_call, self.raw = True, ""
        events.append(CallStart(self._name))
        if self._early:
            events.append(CallArguments(self._early))


def _text_of(json_text: str) -> str | None:
    try:
        value = json.loads(json_text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class HeldTextParser(ABC):
    """Parser of one output. What is no call is content."""

    _marker = ""
    """Text before a call, which is content where no call follows."""

    def __init__(self) -> None:
        self._held = ""
        self._call: CallReader | None = None

    def push(self, text: str) -> Iterator[Event]:
        """Events of the next part of the text."""
        self._held += text
        yield from self._read(is_final=False)

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back."""
        yield from self._read(is_final=True)
        if self._call is not None:
            yield from self._call.finish()
            if self._call.raw:
                yield Content(self._marker + self._call.raw)

    @abstractmethod
    def _read(self, *, is_final: bool) -> Iterator[Event]:
        """Events of the held text; keeps what is not known yet."""
