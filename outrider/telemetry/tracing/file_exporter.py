"""File exporter: spans as OTLP JSON, one export per line, in the format of the collector's file exporter.

Several processes may write the same file: each line is appended in one write.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.errors import ConfigError
from outrider.telemetry.tracing.otlp_json import request_to_json
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind, SpanLink

_log = logging.getLogger(__name__)
_READABLE_BY_OWNER = 0o600


class FileExporter(SpanExporter):
    """Append spans to ``path``; ``ConfigError`` if it cannot be written."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _READABLE_BY_OWNER)
        except OSError as error:
            raise ConfigError("trace_file", f"cannot be written: {error}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one line; a full disk is reported once per batch."""
        if not spans:
            return SpanExportResult.SUCCESS
        request = request_to_json(map(_from_sdk, spans), _values(spans[0].resource.attributes))
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        try:
            is_whole = os.write(self._file, line) == len(line)
        except OSError as error:
            _log.warning("%d spans were not written: %s", len(spans), error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if is_whole else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the file."""
        os.close(self._file)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """No effect: nothing is buffered."""
        return True


def _from_sdk(span: ReadableSpan) -> Span:
    context = span.context
    if context is None:
        raise TypeError("a finished span has a context")
    return Span(
        name=span.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        kind=SpanKind[span.kind.name],
        attributes=_values(span.attributes or {}),
        links=tuple(SpanLink(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links),
        error=(span.status.description or "error") if span.status.status_code.name == "ERROR" else "",
        trace_state=context.trace_state.to_header(),
    )


def _values(attributes: object) -> dict[str, AttributeValue]:
    return dict(attributes)  # type: ignore[call-overload, no-any-return]
