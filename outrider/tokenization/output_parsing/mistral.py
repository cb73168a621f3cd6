"""``[TOOL_CALLS]`` with a list of calls, or before each name and its arguments: Mistral."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event, split_at
from outrider.tokenization.output_parsing.json_calls import ArgumentsReader, CallReader, HeldTextParser

_BEGIN = "[TOOL_CALLS]"
_NAME = re.compile(r"[^\[{]+")
"""Name before ``[CALL_ID]``, ``[ARGS]`` or the arguments."""


class MistralParser(HeldTextParser):
    """Parser of one output.

    Up to version 7 of the tokenizer a list of ``{"name": ..., "arguments": ...}`` follows the marker, from version 11
    on ``NAME{...}`` or ``NAME[CALL_ID]ID[ARGS]{...}``, and each call has a marker.
    """

    def __init__(self) -> None:
        super().__init__()
        self._form = "content"
        """Part that is read: content, the beginning of calls, a list, or the arguments of one call."""
        self._arguments: ArgumentsReader | None = None

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back."""
        yield from super().finish()
        if self._call is None and self._arguments is not None and (held := self._arguments.finish()):
            yield CallArguments(held)
        if self._held:
            yield Content(self._held)

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        waits = False
        while self._held and not waits:
            if self._form == "content":
                before, marker, self._held = split_at(self._held, (_BEGIN,), is_final=is_final)
                if before:
                    yield Content(before)
                self._form = "begin" if marker else "content"
                waits = not marker
            elif self._form == "begin":
                waits = yield from self._begin()
            elif self._form == "list":
                yield from self._read_list()
            else:
                yield from self._read_arguments()

    def _begin(self) -> Generator[Event, None, bool]:
        """Begin what follows a marker; true if more text is needed."""
        text = self._held.lstrip()
        if text.startswith("["):
            self._form, self._held = "list", text[1:]
            return False
        name, brace, rest = text.partition("{")
        if not brace:
            return True
        found = _NAME.match(name)
        self._form, self._held = "arguments", brace + rest
        self._arguments = ArgumentsReader()
        yield CallStart(found.group().strip() if found else "")
        return False

    def _read_list(self) -> Iterator[Event]:
        if self._call is None:
            text = self._held.lstrip(" \t\r\n,")
            if text.startswith("]"):
                self._form, text = "content", text[1:]
            elif text.startswith("{"):
                self._call = CallReader()
            elif text:
                self._form = "content"
            self._held = text
            return
        events, self._held = self._call.push(self._held)
        yield from events
        if self._call.is_done:
            if not self._call.is_call:
                yield Content(self._call.raw)
            self._call = None

    def _read_arguments(self) -> Iterator[Event]:
        reader = self._arguments or ArgumentsReader()
        found, self._held = reader.push(self._held)
        if found:
            yield CallArguments(found)
        if reader.is_done:
            self._form, self._arguments = "content", None
