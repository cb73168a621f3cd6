"""The coordinator's part of a request's trace: what is noted while it runs, and the spans made of it when it ends."""

from outrider_coordinator.tracing.notes import Notes
from outrider_coordinator.tracing.requests import RequestTrace, RequestTraces

__all__ = ["Notes", "RequestTrace", "RequestTraces"]
