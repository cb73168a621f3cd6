"""Exporters that let other threads in while they encode.

Encoding a batch takes milliseconds in one go, and Python lets another thread wait five of them before it takes the
interpreter away: that thread may be the engine's, with a forward to start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import overload

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

SPANS_IN_A_ROW, REST_S = 16, 2e-4
"""So many are made or encoded, in less than half a millisecond, before other threads are let in. Fewer in a row gained
nothing: each waking takes the interpreter from somebody.
"""


class UnhurriedExporter(SpanExporter):
    """An exporter whose spans come to it with rests between them, until it is time to end."""

    def __init__(self, exporter: SpanExporter, ending: threading.Event) -> None:
        self._exporter, self._ending = exporter, ending

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exporters encode while they walk over the spans."""
        return self._exporter.export(spans if self._ending.is_set() else _WithRests(spans))

    def shutdown(self) -> None:
        """End."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what is held back."""
        return self._exporter.force_flush(timeout_millis)


class _WithRests(Sequence[ReadableSpan]):
    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ReadableSpan]: ...

    def __getitem__(self, index: int | slice) -> ReadableSpan | Sequence[ReadableSpan]:
        return self._spans[index]

    def __iter__(self) -> Iterator[ReadableSpan]:
        for number, span in enumerate(self._spans, start=1):
            yield span
            if number % SPANS_IN_A_ROW == 0:
                time.sleep(REST_S)
