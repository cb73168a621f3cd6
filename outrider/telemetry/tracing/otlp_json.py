"""OTLP JSON: conversion of spans in both directions, one ``ExportTraceServiceRequest`` per object.

The collector's file exporter writes the same format, one object per line. Requires neither files nor OpenTelemetry:
protobuf's JSON of the same spans takes six times as long, in a thread beside the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from outrider.telemetry.tracing.names import SERVICE_NAME
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind, SpanLink

_ERROR = 2
_KINDS = {int(kind): kind for kind in SpanKind}


def request_to_json(spans: Iterable[Span], resource: Mapping[str, AttributeValue]) -> dict[str, Any]:
    """An export request with all spans of one process."""
    scope_spans = {"scope": {"name": "outrider"}, "spans": [_span_to_json(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _attributes_to_json(resource)}, "scopeSpans": [scope_spans]}]}


def spans_from_json(request: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of an export request; ``KeyError``, ``TypeError`` or ``ValueError`` if it is invalid."""
    for of_resource in request["resourceSpans"]:
        resource = _attributes_from_json(of_resource.get("resource", {}).get("attributes", ()))
        for of_scope in of_resource.get("scopeSpans", ()):
            for span in of_scope.get("spans", ()):
                yield _span_from_json(span, str(resource.get(SERVICE_NAME, "")))


def _span_to_json(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "traceState": span.trace_state,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes_to_json(span.attributes),
        "links": [{"traceId": link.trace_id, "spanId": link.span_id} for link in span.links],
        "status": {"code": _ERROR, "message": span.error} if span.error else {},
    }


def _span_from_json(content: Mapping[str, Any], service: str) -> Span:
    status = content.get("status") or {}
    return Span(
        name=content["name"],
        trace_id=content["traceId"].lower(),
        span_id=content["spanId"].lower(),
        parent_id=content.get("parentSpanId", "").lower(),
        start_ns=int(content["startTimeUnixNano"]),
        end_ns=int(content["endTimeUnixNano"]),
        kind=_KINDS.get(int(content.get("kind", 0)), SpanKind.INTERNAL),
        attributes=_attributes_from_json(content.get("attributes", ())),
        links=tuple(SpanLink(link["traceId"].lower(), link["spanId"].lower()) for link in content.get("links", ())),
        error=(status.get("message") or "error") if status.get("code") == _ERROR else "",
        trace_state=content.get("traceState", ""),
        service=service,
    )


def _attributes_to_json(attributes: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value_to_json(value)} for key, value in attributes.items()]


def _value_to_json(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [_value_to_json(entry) for entry in value]}}


def _attributes_from_json(attributes: Sequence[Mapping[str, Any]]) -> dict[str, AttributeValue]:
    return {entry["key"]: _value_from_json(entry.get("value", {})) for entry in attributes}


def _texts(array: Any) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    return tuple(str(_value_from_json(entry)) for entry in array.get("values", ()))


def _value_from_json(value: Mapping[str, Any]) -> AttributeValue:
    """Value types that Outrider never writes become text."""
    kind, content = next(iter(value.items()), ("stringValue", ""))
    if kind == "intValue":
        return int(content)
    if kind == "doubleValue":
        return float(content)
    if kind == "boolValue":
        return bool(content)
    if kind == "arrayValue":
        return _texts(content)
    return str(content)
