"""Switch of tracing: the standard ``OTEL_*`` variables and the setting ``trace_file``.

Tracing is off unless an exporter, an OTLP endpoint or a file is set. If it is off, OpenTelemetry is not imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from outrider.errors import ConfigError, install_command
from outrider.telemetry.tracing.context import TraceContext
from outrider.telemetry.tracing.names import NO_EXPORTER, OTLP
from outrider.telemetry.tracing.span import BuildSpans

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = f"opentelemetry is not installed: {install_command('telemetry')}"

_SWITCH_INTERVAL_S = 5e-4
"""Switch interval of the interpreter while threads make and encode spans, in seconds; Python's default is 5 ms."""


class Tracing(Protocol):
    """Destination of finished spans. Thread-safe."""

    def sample(self, name: str, parent: TraceContext | None) -> TraceContext | None:
        """Context of a new span below ``parent``; None if it is not sampled."""
        ...

    def emit(self, build: BuildSpans) -> None:
        """Make and export spans in a background thread; returns at once."""
        ...

    def close(self) -> None:
        """Export the rest within a bounded time."""
        ...


def activate_tracing(
    service: str, *, trace_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> Tracing | None:
    """Return the tracing of the process, or None if it is off. ``service``: "coordinator", "draft" or "target".

    Raises ``ConfigError`` if a file is set and OpenTelemetry is missing. For variables, which may be set for a whole
    cluster, this is only a warning.
    """
    exporters = exporter_names(environ)
    if trace_file is None and not exporters:
        return None
    try:
        from outrider.telemetry.tracing.pipeline import Pipeline
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        if trace_file is not None:
            raise ConfigError("trace_file", _INSTALL) from error
        _log.warning("no traces: %s", _INSTALL)
        return None
    return Pipeline.open(service, exporters, trace_file=trace_file, environ=environ)


@contextlib.asynccontextmanager
async def traced(service: str, *, trace_file: str | None) -> AsyncIterator[Tracing | None]:
    """``activate_tracing`` while the process serves; the rest is exported at the end."""
    tracing = activate_tracing(service, trace_file=trace_file)
    usual = sys.getswitchinterval()
    try:
        if tracing is not None:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        yield tracing
    finally:
        sys.setswitchinterval(usual)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def exporter_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The exporters of the standard variables: those named, or OTLP if an endpoint is set."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not named:
        return (OTLP,) if any(environ.get(name, "").strip() for name in _ENDPOINTS) else ()
    names = tuple(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
    return () if NO_EXPORTER in names else names
