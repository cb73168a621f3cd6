"""The network that a process is in: two processes that name the same reach each other at the loopback address."""

from __future__ import annotations

from pathlib import Path


def channel_host() -> str:
    """Names the host's running kernel and the network namespace; empty where that cannot be told."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""
