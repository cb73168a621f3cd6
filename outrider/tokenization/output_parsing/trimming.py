"""Blanks around reasoning and tool calls, which belong to neither; content after reasoning begins with the first line
that the model wrote.
"""

from __future__ import annotations

import string
from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import Content, Event, OutputParser, Reasoning

_LINE_ENDS = "\r\n"


class TrimmingParser:
    """Passes on the events of another parser without the blanks around reasoning and calls."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self._kind: type[Event] | None = None
        """Kind of the last event."""
        self._dropped = ""
        """Characters that are left out where the current text begins."""
        self._held = ""
        """Blanks at the end of the current text."""

    def push(self, text: str) -> Iterator[Event]:
        """Events of the next part of the text."""
        for event in self._inner.push(text):
            yield from self._trim(event)

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back."""
        for event in self._inner.finish():
            yield from self._trim(event)
        if self._held and self._kind is Content:
            yield Content(self._held)

    def _trim(self, event: Event) -> Iterator[Event]:
        kind = type(event)
        if kind is not self._kind:
            self._dropped = _dropped_between(self._kind, kind)
            self._kind, self._held = kind, ""
        if not isinstance(event, Content | Reasoning):
            yield event
            return
        text = event.text.lstrip(self._dropped)
        self._dropped = "" if text else self._dropped
        kept = text.rstrip()
        if kept:
            yield type(event)(self._held + kept)
            self._held = ""
        self._held += text[len(kept) :]


def _dropped_between(before: type[Event] | None, kind: type[Event]) -> str:
    if before is None and kind is not Reasoning:
        return ""
    return _LINE_ENDS if before is Reasoning and kind is Content else string.whitespace
