"""Base of parsers that hold text back until it is known what it is, and read calls as JSON objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import Content, Event
from outrider.tokenization.output_parsing.json_calls import CallReader


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
