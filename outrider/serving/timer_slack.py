"""Threads that are woken when they asked to be. Owns the one setting that says so, and how often they look. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

LOOK_S = 20e-6
"""Whoever waits for a device looks that often whether it is done."""
_punctual = threading.local()


def be_punctual() -> None:
    """Have the calling thread's short sleeps end in time: Linux lets one sleep 50 us longer, unless it says that this
    matters.
    """
    if not getattr(_punctual, "is_set", False):
        _punctual.is_set = True
        with contextlib.suppress(OSError):
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1000", encoding="ascii")
