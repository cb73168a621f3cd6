"""What a running process says of itself: logging, and how it ends when it must.

Knows no transport, no device and no request. Metrics and tracing come with a later issue.
"""

from outrider.telemetry.endings import exit_cleanly
from outrider.telemetry.logs import set_up_logging
from outrider.telemetry.output import guard_output

__all__ = ["exit_cleanly", "guard_output", "set_up_logging"]
