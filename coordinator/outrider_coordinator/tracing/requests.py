"""Sampling of requests for traces, and their ids.

Owns the request's span and the decode span, whose ids are made before anything is sent, since the services' spans hang
below the latter. A request that is not sampled keeps the trace of its caller, for the result and the logs.
"""

from __future__ import annotations

from functools import partial

from outrider.generation import GenerationRequest
from outrider.telemetry.tracing import TraceContext, Tracing
from outrider.telemetry.tracing.context import new_span_id
from outrider.telemetry.tracing.names import TEXT_COMPLETION
from outrider_coordinator.session.actions import Fail, Finish
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.tracing.notes import Notes
from outrider_coordinator.tracing.spans import Ids, RequestFacts, refused_request, request_spans


class RequestTrace:
    """One request's trace, or that it has none."""

    def __init__(
        self, caller: TraceContext | None, tracing: Tracing | None, ids: Ids | None, notes: Notes | None
    ) -> None:
        self.notes = notes
        """None when it is not sampled."""
        self._caller, self._tracing, self._ids = caller, tracing, ids

    @property
    def trace_id(self) -> str:
        """Empty when it is part of no trace."""
        if self._ids is not None:
            return self._ids.request.trace_id
        return self._caller.trace_id if self._caller is not None else ""

    @property
    def log_fields(self) -> dict[str, str]:
        """Log fields of the trace, beside the request's own id."""
        return {"trace_id": self.trace_id} if self.trace_id else {}

    @property
    def trace_parent(self) -> str:
        """``traceparent`` of items; the caller's where nothing is traced here, since its services may be."""
        if self._ids is not None:
            return self._ids.decode.trace_parent
        is_handed_on = self._tracing is None and self._caller is not None and self._caller.is_sampled
        return self._caller.trace_parent if is_handed_on and self._caller is not None else ""

    def refused(self, request: GenerationRequest, error: BaseException) -> None:
        """The request was not taken in."""
        if self.notes is not None and self._ids is not None and self._tracing is not None:
            self.notes.ended()
            self._tracing.emit(partial(refused_request, self._ids, self.notes, request.request_id, error))

    def ended(self, loop: SessionLoop, ending: Finish | Fail) -> None:
        """The request is over: its spans are made, elsewhere."""
        if self.notes is not None and self._ids is not None and self._tracing is not None:
            self.notes.ended()
            facts = RequestFacts.of(loop, ending)
            self._tracing.emit(partial(request_spans, self._ids, self.notes, facts))


NOT_TRACED = RequestTrace(None, None, None, None)


class RequestTraces:
    """Begins the traces of a coordinator's requests."""

    def __init__(self, tracing: Tracing | None, *, max_steps: int) -> None:
        self._tracing = tracing
        self._max_steps = max_steps

    def begin(self, request: GenerationRequest) -> RequestTrace:
        """The trace of a request that has just arrived."""
        if self._tracing is None and not request.trace_parent:
            return NOT_TRACED
        caller = TraceContext.parse(request.trace_parent, request.trace_state) if request.trace_parent else None
        found = None if self._tracing is None else self._tracing.sample(TEXT_COMPLETION, caller)
        if found is None:
            return RequestTrace(caller, self._tracing, None, None)
        decode = TraceContext(found.trace_id, new_span_id(), is_sampled=True, state=found.state)
        ids = Ids(found, decode, caller.span_id if caller else "")
        return RequestTrace(caller, self._tracing, ids, Notes(self._max_steps))
