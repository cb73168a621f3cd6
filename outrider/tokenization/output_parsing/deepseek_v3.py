"""``<｜tool▁calls▁begin｜>`` and a call each: a name, and the arguments in a JSON block. DeepSeek-V3, R1 and what is
distilled from it.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Content, Event, split_at
from outrider.tokenization.output_parsing.json_calls import HeldTextParser, JsonValue

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_NAME, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BLOCK_BEGIN, BLOCK_END = "\n```json\n", "\n```"


_MARKERS = (CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END)


class DeepSeekV3Parser(HeldTextParser):
    """Parser of one output. What is no call is content, without the markers around calls."""

    def __init__(self) -> None:
        super().__init__()
        self._is_call = False
        self._arguments: JsonValue | None = None
        """Arguments of the current call, after its name."""

    def _read(self, *, is_final: bool) -> Iterator[Event]:
        while self._held:
            if not self._is_call:
                before, marker, self._held = split_at(self._held, _MARKERS, is_final=is_final)
                if before:
                    yield Content(before)
                if not marker:
                    return
                self._is_call = marker == CALL_BEGIN
            elif self._arguments is None:
                head, marker, rest = split_at(self._held, (BLOCK_BEGIN, *_MARKERS), is_final=is_final)
                if not marker and not is_final:
                    return
                self._held, self._arguments = rest, JsonValue() if marker == BLOCK_BEGIN else None
                self._is_call = marker in (BLOCK_BEGIN, CALL_BEGIN)
                named = CallStart(head.rpartition(CALL_NAME)[2].strip())
                yield named if marker == BLOCK_BEGIN else Content(CALL_BEGIN + head)
            elif not self._arguments.is_done:
                # JSON has no line end in a text, and may have other markers there.
                text, marker, rest = split_at(self._held, (BLOCK_END,), is_final=is_final)
                count = self._arguments.push(text)
                self._held = text[count:] + marker + rest
                if count:
                    yield CallArguments(text[:count])
                self._arguments.is_done |= bool(marker)
                if not self._arguments.is_done:
                    return
            else:
                _, marker, self._held = split_at(self._held, (BLOCK_END, CALL_END, CALLS_END), is_final=is_final)
                if not marker:
                    return
                self._is_call, self._arguments = False, None
