"""A pipeline whose spans are encoded as OTLP, as for a collector, counted, and go nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.telemetry.tracing.pipeline import Pipeline, resource_of


class DiscardingExporter(SpanExporter):
    """Counts what it drops."""

    def __init__(self) -> None:
        self.num_spans: Counter[str] = Counter()
        """By name."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode them."""
        self.num_spans.update(span.name for span in spans)
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def make_pipeline(exporter: DiscardingExporter) -> Pipeline:
    """A pipeline of the usual size."""
    provider = TracerProvider(resource=resource_of("benchmark", {}), shutdown_on_exit=False)
    return Pipeline(provider, [exporter], {})
