"""Tracing: one trace per request, over the SDK, the coordinator and both services.

Owns contexts, names, the export of finished spans, and the switch. Only ``pipeline`` and ``yielding_exporter``
import OpenTelemetry, and only if there is an exporter or a file.
"""

from outrider.telemetry.tracing.activation import Tracing, activate_tracing, traced
from outrider.telemetry.tracing.context import TraceContext

__all__ = ["TraceContext", "Tracing", "traced", "activate_tracing"]
