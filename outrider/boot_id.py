"""The id that Linux draws at each start of a host: processes that read the same one run on the same kernel."""

from __future__ import annotations

from pathlib import Path

_PATH = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this host's start; empty where the system has none or hides it."""
    try:
        return _PATH.read_text(encoding="ascii").strip()
    except OSError:
        return ""
