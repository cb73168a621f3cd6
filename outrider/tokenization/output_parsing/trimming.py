"""Blanks between reasoning, content and tool calls, which belong to none of them."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import Content, Event, OutputParser, Reasoning


class TrimmingParser:
    """Passes on the events of another parser without the blanks around reasoning and calls."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self._kind: type[Event] | None = None
        """Kind of the last event."""
        self._drops_blanks = False
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
            self._drops_blanks = self._kind is not None or kind is Reasoning
            self._kind, self._held = kind, ""
        if not isinstance(event, Content | Reasoning):
            yield event
            return
        text = event.text.lstrip() if self._drops_blanks else event.text
        self._drops_blanks = self._drops_blanks and not text
        kept = text.rstrip()
        if kept:
            yield type(event)(self._held + kept)
            self._held = ""
        self._held += text[len(kept) :]
