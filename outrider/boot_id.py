"""Identity of a host: the id that Linux draws at each start, and the network namespace.

Processes that read the same boot id run on the same kernel; with the same ``channel_host`` they reach each other at the
loopback address.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this host's start; empty where the system has none or hides it."""
    try:
        return PATH.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def channel_host() -> str:
    """Name of the running kernel and the network namespace; empty where that cannot be told."""
    kernel = boot_id()
    try:
        return f"{kernel}/{Path('/proc/self/ns/net').stat().st_ino}" if kernel else ""
    except OSError:
        return ""
