"""Trace context of a request in gRPC metadata: ``traceparent`` and ``tracestate`` of W3C.

Also extracts the ids of an arriving request for the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outrider.generation import GenerationRequest
from outrider.telemetry.tracing.context import TRACE_PARENT, TRACE_STATE, TraceContext

_MAX_STATE_CHARACTERS = 512
"""Maximum length of ``tracestate`` that W3C requires to propagate; a longer one is dropped, which it allows."""


def trace_metadata(request: GenerationRequest) -> tuple[tuple[str, str], ...]:
    """Metadata of a traced call; empty otherwise."""
    pairs = ((TRACE_PARENT, request.trace_parent), (TRACE_STATE, request.trace_state))
    return tuple((key, value) for key, value in pairs if value)


def with_trace(request: GenerationRequest, metadata: Iterable[tuple[str, str | bytes]] | None) -> GenerationRequest:
    """The request with the trace context of its caller; an invalid ``traceparent`` is ignored, as W3C requires."""
    values = {key: value for key, value in metadata or () if key in (TRACE_PARENT, TRACE_STATE)}
    parent, state = values.get(TRACE_PARENT, ""), values.get(TRACE_STATE, "")
    if not isinstance(parent, str) or TraceContext.parse(parent) is None:
        return request
    if not isinstance(state, str) or len(state) > _MAX_STATE_CHARACTERS:
        state = ""
    return replace(request, trace_parent=parent, trace_state=state)


def log_fields(request: GenerationRequest) -> dict[str, str]:
    """Log fields of a request that has just arrived, from the ids that its caller sent."""
    trace = TraceContext.parse(request.trace_parent)
    named = {"request_id": request.request_id, "trace_id": trace.trace_id if trace is not None else ""}
    return {key: value for key, value in named.items() if value}
