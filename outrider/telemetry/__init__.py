"""Telemetry of a process: logging, metrics, tracing, and its last line after an error."""

from outrider.telemetry.logs import set_up_logging
from outrider.telemetry.output import drain_output, exit_cleanly, guard_output

__all__ = ["drain_output", "exit_cleanly", "guard_output", "set_up_logging"]
