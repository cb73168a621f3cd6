"""Tool calls that a grammar enforces: the arguments of one call, or a list of calls, as the whole output."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event
from outrider.tokenization.output_parsing.json_calls import CallReader


class NamedCallParser:
    """Parser of the arguments of a call of the tool ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> Iterator[Event]:
        """Events of the next part of the text."""
        if not self._has_begun:
            text = text.lstrip()  # blanks after reasoning
        if text and not self._has_begun:
            self._has_begun = True
            yield CallStart(self._name)
        if text:
            yield CallArguments(text)

    def finish(self) -> Iterator[Event]:
        """Nothing is held back."""
        yield from ()


class CallListParser:
    """Parser of ``[{"name": ..., "parameters": {...}}, ...]``; what does not begin as a call is content."""

    def __init__(self) -> None:
        self._call: CallReader | None = None

    def push(self, text: str) -> Iterator[Event]:
        """Events of the next part of the text."""
        while text:
            if self._call is None:
                text = text.lstrip(" \t\r\n[],")
                if not text:
                    return
                self._call = CallReader()
            before = text
            events, text = self._call.push(text)
            yield from events
            if self._call.is_done:
                self._call = None
                if text == before:
                    yield Content(text)
                    return

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back."""
        if self._call is not None:
            yield from self._call.finish()
