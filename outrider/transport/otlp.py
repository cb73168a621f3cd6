"""OTLP receiver of traces over gRPC, used by ``outrider trace``.

Converts OTLP protobuf to ``telemetry.tracing.span.Span``. Requires the extra ``telemetry``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from outrider.addresses import join_address
from outrider.errors import ConfigError
from outrider.telemetry.tracing.names import SERVICE_NAME
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind, SpanLink

OnSpans = Callable[[list[Span]], None]

_ERROR = 2
_KINDS = {int(kind): kind for kind in SpanKind}


class _Receiver(TraceServiceServicer):
    def __init__(self, on_spans: OnSpans) -> None:
        self._on_spans = on_spans

    async def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        """Receive one export."""
        self._on_spans(list(spans_from_proto(request)))
        return ExportTraceServiceResponse()


class OtlpServer:
    """A listening receiver."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address
        """Address on which it listens, with the port that was chosen for port 0."""

    async def stop(self) -> None:
        """Stop at once."""
        await self._server.stop(None)


async def serve_otlp(on_spans: OnSpans, *, host: str, port: int) -> OtlpServer:
    """Listen; ``on_spans`` is called on this event loop. ``ConfigError`` if the port is in use."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(_Receiver(on_spans), server)
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise ConfigError("listen", f"cannot listen on {join_address(host, port)}: {error}") from error
    await server.start()
    return OtlpServer(server, join_address(host, bound))


def spans_from_proto(request: ExportTraceServiceRequest) -> Iterator[Span]:
    """The spans of one export."""
    for of_resource in request.resource_spans:
        service = str(_attributes(of_resource.resource.attributes).get(SERVICE_NAME, ""))
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield _span(span, service)


def _span(message: Any, service: str) -> Span:  # noqa: ANN401 - ships no types
    return Span(
        name=message.name,
        trace_id=message.trace_id.hex(),
        span_id=message.span_id.hex(),
        parent_id=message.parent_span_id.hex(),
        start_ns=message.start_time_unix_nano,
        end_ns=message.end_time_unix_nano,
        kind=_KINDS.get(message.kind, SpanKind.INTERNAL),
        attributes=_attributes(message.attributes),
        links=tuple(SpanLink(link.trace_id.hex(), link.span_id.hex()) for link in message.links),
        error=(message.status.message or "error") if message.status.code == _ERROR else "",
        trace_state=message.trace_state,
        service=service,
    )


def _attributes(attributes: Iterable[Any]) -> dict[str, AttributeValue]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: Any) -> AttributeValue:  # noqa: ANN401 - ships no types
    """Kinds of value that we never write become text."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(str(_value(entry)) for entry in value.array_value.values)
    if kind in {"string_value", "bool_value", "int_value", "double_value"}:
        plain: AttributeValue = getattr(value, kind)
        return plain
    return str(value)
