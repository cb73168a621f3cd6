"""Export of finished spans through OpenTelemetry's sampler, batch processor and exporters.

Owns the thread that makes spans from records, so that neither event loops nor engines make them. The SDK gets finished
spans: starting and ending them there would take 50 us each in the traced loops.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import SpanKind as SdkSpanKind

from outrider import __version__
from outrider.errors import ConfigError
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.context import TraceContext, new_span_id, new_trace_id
from outrider.telemetry.tracing.span import BuildSpans, Span, SpanKind
from outrider.telemetry.tracing.span_file import SpanFile
from outrider.telemetry.tracing.yielding_exporter import REST_S, SPANS_IN_A_ROW, YieldingExporter

_log = logging.getLogger(__name__)

MAX_WAITING = 16_384
"""Maximum number of requests, or items of a service, that wait to be converted to spans; more are dropped and counted.
"""
MAX_WAITING_SPANS = 65_536
"""Queue length of the batch processor unless ``OTEL_BSP_*`` sets one; the default of 2,048 loses most spans of a busy
second.
"""
MAX_BATCH_SPANS = 128
"""Maximum number of spans in one export, unless set; this many are lost at a time if the collector is away."""
_GATHER_S = 0.1
"""Interval of the conversion in seconds. Waking a thread at each step would make it compete for the interpreter."""
CLOSE_S = 5.0
"""Longest wait for the last spans at the end of a process."""
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_KINDS = {kind: SdkSpanKind[kind.name] for kind in SpanKind}
_SCOPE = InstrumentationScope("outrider", __version__)


class Pipeline:
    """Implements ``activation.Tracing``."""

    def __init__(
        self,
        provider: TracerProvider,
        exporters: Sequence[SpanExporter],
        environ: Mapping[str, str] = os.environ,
        *,
        file: SpanFile | None = None,
    ) -> None:
        """``file`` gets the spans without the SDK's conversions, which take as long as the rest."""
        self.num_dropped = 0
        self._provider, self._file = provider, file
        self._waiting: deque[BuildSpans] = deque()
        self._ending = threading.Event()
        self._processors = [_batched(YieldingExporter(exporter, self._ending), environ) for exporter in exporters]
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, service: str, exporters: Sequence[str], *, trace_file: str | None, environ: Mapping[str, str]
    ) -> Pipeline:
        """Open the exporters; ``ConfigError`` for one that is not installed or a file that cannot be written."""
        made = [_make_exporter(name, environ) for name in exporters]
        resource = resource_of(service, environ)
        values: Any = resource.attributes
        file = None if trace_file is None else SpanFile(trace_file, dict(values))
        return cls(TracerProvider(resource=resource, shutdown_on_exit=False), made, environ, file=file)

    def sample(self, name: str, parent: TraceContext | None) -> TraceContext | None:
        """Sample as ``OTEL_TRACES_SAMPLER`` says."""
        above = None if parent is None else set_span_in_context(NonRecordingSpan(_sdk_context(parent, is_remote=True)))
        trace_id = new_trace_id() if parent is None else parent.trace_id
        result = self._provider.sampler.should_sample(above, int(trace_id, 16), name, SdkSpanKind.SERVER)
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        return TraceContext(trace_id, new_span_id(), is_sampled=True, state=parent.state if parent else "")

    def emit(self, build: BuildSpans) -> None:
        """Queue the record, or drop and count it if too many wait."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(build)
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Export the rest; an exporter that does not answer is given a few seconds."""
        closing = threading.Thread(target=self._finish, name="tracing end", daemon=True)
        closing.start()
        closing.join(2 * CLOSE_S)
        if self.num_dropped:
            _log.warning("spans of %d requests or items were dropped: too many were waiting", self.num_dropped)

    def _finish(self) -> None:
        self._ending.set()
        self._thread.join(CLOSE_S)
        for processor in self._processors:
            processor.shutdown()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._ending.wait(_GATHER_S):
            self._make_waiting()
        self._make_waiting()

    def _make_waiting(self) -> None:
        made: list[Span] = []
        while self._waiting:
            build = self._waiting.popleft()
            try:
                for span in build():
                    made.append(span)
                    if len(made) == SPANS_IN_A_ROW:
                        self._export(made)
                        made = []
                        if self._has_time:
                            time.sleep(REST_S)
            except Exception:  # a failure to export spans must not fail requests
                _log.exception("spans could not be made")
        if made:
            self._export(made)

    @property
    def _has_time(self) -> bool:
        return len(self._waiting) < MAX_WAITING // 4 and not self._ending.is_set()

    def _export(self, spans: Sequence[Span]) -> None:
        if self._file is not None:
            self._file.write(spans)
        for converted in [to_sdk(span, self._provider.resource) for span in spans] if self._processors else ():
            for processor in self._processors:
                processor.on_end(converted)


def _batched(exporter: SpanExporter, environ: Mapping[str, str]) -> SpanProcessor:
    """The SDK's batch processor, with sizes of this module unless the standard variables set them."""
    if environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE"):
        return BatchSpanProcessor(exporter)  # the one has to fit the other
    return BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING_SPANS, max_export_batch_size=MAX_BATCH_SPANS)


def to_sdk(span: Span, resource: Resource) -> ReadableSpan:
    """Convert to a finished span of the SDK."""
    context = TraceContext(span.trace_id, span.span_id, is_sampled=True, state=span.trace_state)
    parent = TraceContext(span.trace_id, span.parent_id, is_sampled=True) if span.parent_id else None
    return ReadableSpan(
        name=span.name,
        context=_sdk_context(context),
        parent=None if parent is None else _sdk_context(parent, is_remote=span.kind is SpanKind.SERVER),
        resource=resource,
        attributes=dict(span.attributes),
        links=[SdkLink(_sdk_context(TraceContext(link.trace_id, link.span_id, True))) for link in span.links],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _sdk_context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote,
        TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT),
        TraceState.from_header([context.state]) if context.state else None,
    )


class _HashedOnce(Resource):
    """A resource that caches its hash: the SDK's serializes the whole resource at each lookup."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def resource_of(service: str, environ: Mapping[str, str]) -> Resource:
    """The resource; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` take precedence over Outrider's names."""
    ours = {
        names.SERVICE_NAMESPACE: "outrider",
        names.SERVICE_VERSION: __version__,
        names.ROLE: service,
    }
    given = Resource.create()
    is_named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    name = {} if is_named else {names.SERVICE_NAME: f"outrider-{service}"}
    return _HashedOnce(Resource(ours).merge(given).merge(Resource(name)).attributes)


def _make_exporter(name: str, environ: Mapping[str, str]) -> SpanExporter:
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    entry = _PROTOCOLS.get(protocol, protocol) if name == names.OTLP else name
    found = list(entry_points(group="opentelemetry_traces_exporter", name=entry))
    if not found:
        raise ConfigError("OTEL_TRACES_EXPORTER", f"asks for {entry!r}, which is not installed")
    make: Callable[[], SpanExporter] = found[0].load()
    return make()
