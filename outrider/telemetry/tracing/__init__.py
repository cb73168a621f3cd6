"""Tracing: one trace per request, over the SDK, the coordinator and both services.

Owns contexts, names, the export of finished spans, and the switch. Only ``pipeline``, ``unhurried`` and
``file_exporter`` import OpenTelemetry, and only if there is an exporter.
"""

from outrider.telemetry.tracing.context import TraceContext
from outrider.telemetry.tracing.turning_on import Tracing, traced, turn_on_tracing

__all__ = ["TraceContext", "Tracing", "traced", "turn_on_tracing"]
