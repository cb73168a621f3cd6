"""Timer slack of threads that poll a device, and how often they poll."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

POLL_INTERVAL_S = 20e-6
"""Interval at which a thread polls its device."""
_slack = threading.local()


def reduce_timer_slack() -> None:
    """End the calling thread's short sleeps in time: by default Linux may prolong each by 50 us."""
    if not getattr(_slack, "is_set", False):
        _slack.is_set = True
        with contextlib.suppress(OSError):
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1000", encoding="ascii")
