"""``<｜tool▁calls▁begin｜>`` and a call each: a name, and the arguments in a JSON block. DeepSeek-V3, R1 and what is
distilled from it.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event, split_at
from outrider.tokenization.output_parsing.held_text import HeldTextParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_NAME, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BLOCK_BEGIN, BLOCK_END = "\n```json\n", "\n```"


_MARKERS = (CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END)


class DeepSeekV3Parser(HeldTextParser):
    """Parser of one output. What is no call is content, without the markers around calls."""

    def __init__(self) -> None:
        super().__init__()
        self._is_call = self._has_name = False

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        while self._held:
            if not self._is_call:
                before, marker, self._held = split_at(self._held, _MARKERS, is_final=is_final)
                if before:
                    yield Content(before)
                if not marker:
                    return
                self._is_call = marker == CALL_BEGIN
            elif not self._has_name:
                head, marker, rest = split_at(self._held, (BLOCK_BEGIN, *_MARKERS), is_final=is_final)
                if not marker and not is_final:
                    return
                self._held, self._has_name = rest, marker == BLOCK_BEGIN
                self._is_call = marker in (BLOCK_BEGIN, CALL_BEGIN)
                yield CallStart(head.rpartition(CALL_NAME)[2].strip()) if self._has_name else Content(CALL_BEGIN + head)
            else:
                text, marker, self._held = split_at(self._held, (BLOCK_END, CALL_END, CALLS_END), is_final=is_final)
                if text:
                    yield CallArguments(text)
                if not marker:
                    return
                self._is_call = self._has_name = False
