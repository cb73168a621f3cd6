"""Limits of the tensor plane's connections: how large, and how long anything may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """Limits of one connection; both ends have the same defaults."""

    ring_bytes: int = 64 << 20
    """Bytes of a ring in main memory."""
    device_ring_bytes: int = 192 << 20
    """Bytes of a ring on a GPU: the parts of a long prompt's states that may be under way, of two sessions."""
    transfer_s: float = 3.0
    """Longest time of a transfer, and of waiting for one."""
    opening_s: float = 20.0
    """Longest time of opening one plane and sending its probes."""
    silence_s: float = 5.0
    """Time without any message after which the peer is gone; heartbeats are ten times as frequent."""
    unread_s: float = 10.0
    """Seconds after which a tensor that was not fetched is given up."""
