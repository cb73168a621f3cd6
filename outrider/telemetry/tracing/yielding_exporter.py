"""Exporter that yields to other threads while it encodes.

Encoding a batch takes several milliseconds, and Python's default switch interval makes other threads wait for 5 ms. One
of them may be the engine's, with a forward to start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import overload

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

SPANS_IN_A_ROW, REST_S = 16, 2e-4
"""Number of spans that are made or encoded, in less than half a millisecond, before other threads run. Smaller numbers
gained nothing.
"""


class YieldingExporter(SpanExporter):
    """Exporter that gets its spans with pauses between them, until shutdown."""

    def __init__(self, exporter: SpanExporter, ending: threading.Event) -> None:
        self._exporter, self._ending = exporter, ending

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export with pauses: exporters encode while they iterate over the spans."""
        return self._exporter.export(spans if self._ending.is_set() else _WithRests(spans))

    def shutdown(self) -> None:
        """End."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export the buffered spans."""
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
