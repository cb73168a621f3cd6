"""``{"name": ..., "parameters": {...}}`` as the whole output, several with ``;``: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.tokenization.output_parsing.events import Content, Event
from outrider.tokenization.output_parsing.json_calls import CallReader, HeldTextParser

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser(HeldTextParser):
    """Parser of one output. Nothing marks a call, so an object is one only if it names a tool of the request."""

    def __init__(self, is_tool: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_tool = is_tool
        self._is_content = False
        """No more calls may follow."""

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        while self._held:
            if self._is_content:
                text, self._held = self._held, ""
                yield Content(text)
                return
            if self._call is None:
                text = self._held.lstrip(_BETWEEN)
                blanks = self._held[: len(self._held) - len(text)]
                if len(text) < len(_TAG) and _TAG.startswith(text) and not is_final:
                    return
                untagged = text.removeprefix(_TAG)
                text = untagged.lstrip()
                if not text and not is_final:
                    return
                if not text.startswith("{"):
                    self._is_content, self._held = True, blanks + untagged
                    continue
                self._call, self._held = CallReader(self._is_tool), text
            events, self._held = self._call.push(self._held)
            yield from events
            if self._call.is_done:
                if not self._call.is_call:
                    self._is_content, self._held = True, self._call.raw + self._held
                self._call = None
