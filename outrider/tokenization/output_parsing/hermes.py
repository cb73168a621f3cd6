"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import Content, Event, split_at
from outrider.tokenization.output_parsing.json_calls import CallReader, HeldTextParser

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(HeldTextParser):
    """Parser of one output. What is no call between the markers is content, markers included."""

    _marker = _BEGIN

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False
        """State after a call, before the marker of its end."""

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        while self._held:
            if self._is_closing and not self._close(is_final=is_final):
                return
            if self._call is None:
                before, marker, self._held = split_at(self._held, (_BEGIN,), is_final=is_final)
                if before:
                    yield Content(before)
                if not marker:
                    return
                self._call = CallReader()
            # Blanks before the object belong to neither.
            text = self._held if self._call.raw or self._call.is_call else self._held.lstrip()
            events, self._held = self._call.push(text)
            yield from events
            if self._call.is_done:
                if not self._call.is_call:
                    yield Content(_BEGIN + self._call.raw)
                self._is_closing, self._call = self._call.is_call, None

    def _close(self, *, is_final: bool) -> bool:
        """Skip the end marker; False if more text is needed to find it. A model may leave it out."""
        text = self._held.lstrip(" \t\r\n}")
        is_cut = len(text) < len(_END) and _END.startswith(text)
        if is_cut and not is_final:
            return False
        self._held = "" if is_cut else text.removeprefix(_END)
        self._is_closing = False
        return True
