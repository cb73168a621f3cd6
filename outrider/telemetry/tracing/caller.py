"""The span in which a program of ours calls somebody, where that program is traced by OpenTelemetry.

Imports nothing of it: who has an active span has imported it already.
"""

from __future__ import annotations

import sys

from outrider.telemetry.tracing.context import TraceContext


def active_context() -> TraceContext | None:
    """The context of the span that is active here; None when there is none."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return TraceContext(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        bool(context.trace_flags & 1),
        context.trace_state.to_header(),
    )
