"""Tracing: one trace a request, over the SDK, the coordinator and both services.

Owns contexts, names, the way of finished spans out of the process, and what turns it on. OpenTelemetry is imported by
``pipeline``, ``unhurried`` and ``file_exporter`` alone, when there is something to export to; the rest is plain Python.
"""

from outrider.telemetry.tracing.context import TraceContext
from outrider.telemetry.tracing.turning_on import Tracing, traced, turn_on_tracing

__all__ = ["TraceContext", "Tracing", "traced", "turn_on_tracing"]
