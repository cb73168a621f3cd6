"""The network that a process is in: two processes that name the same reach each other at the loopback address."""

from __future__ import annotations

from pathlib import Path

from outrider.boot_id import boot_id


def channel_host() -> str:
    """Names the host's running kernel and the network namespace; empty where that cannot be told."""
    kernel = boot_id()
    try:
        return f"{kernel}/{Path('/proc/self/ns/net').stat().st_ino}" if kernel else ""
    except OSError:
        return ""
