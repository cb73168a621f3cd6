"""Link counts: open links or calls per host, and their limit.

A link costs memory, heartbeats and a part of every message round, even without sessions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from outrider.errors import CapacityError

MAX_LINKS_PER_HOST = 64
"""A coordinator has one link to a service, and a host some coordinators."""
_RETRY_AFTER_MS = 1000


class LinkCounts:
    """Open links of one service by host, or ``what`` else is counted. Belongs to one event loop."""

    def __init__(self, max_per_host: int = MAX_LINKS_PER_HOST, what: str = "links") -> None:
        self._max_per_host, self._what = max_per_host, what
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def entered(self, peer: str) -> Iterator[None]:
        """Count one of ``peer``, as gRPC names it; ``CapacityError`` if its host has the maximum number."""
        host = host_of(peer)
        if self._open[host] >= self._max_per_host:
            raise CapacityError(
                f"{host} has {self._open[host]} {self._what} open here, as many as one host may; close one first",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._open[host] += 1
        try:
            yield
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]


def host_of(peer: str) -> str:
    """The host in "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711"; all unix sockets count as one host."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else kind
