"""Open requests of a process: the bytes that it holds of them, and their bound.

A chat of some megabytes becomes a prompt of some hundred tokens. Until then it takes about three times its bytes, as
does every other one that arrives meanwhile. Belongs to one event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from outrider.errors import CapacityError

DEFAULT_MAX_BYTES = 64 << 20
"""The default of a coordinator and of a gateway: seven of the largest requests at the same time."""
_SMALL_SHARE = 4096
"""Divisor of the limit: a request may always hold this part of it, 16 KiB of 64 MiB, which is less than the buffers of
its connection. Thirty requests that arrive slowly would leave nothing to others.
"""
_RETRY_AFTER_MS = 1000
"""Hint to a refused client: about a second until a request has ended."""


class OpenRequests:
    """Bytes that are held of all requests."""

    def __init__(self, most_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        """Bytes that are held now."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[HeldBytes]:
        """The bytes of one more request, none yet; they are released at the end."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            held.release()


class HeldBytes:
    """Bytes that are held of one request."""

    def __init__(self, of_all: OpenRequests) -> None:
        self._of_all, self._count = of_all, 0

    def take(self, count: int) -> None:
        """Hold ``count`` bytes more. ``CapacityError`` if the request then had more than half of what others leave, so
        that large requests leave room to others; one that is small or alone is always taken.
        """
        wanted, others, most = self._count + count, self._of_all.num_bytes - self._count, self._of_all.most_bytes
        if others and wanted > most // _SMALL_SHARE and 2 * wanted > most - others:
            raise CapacityError(
                f"requests of {others} bytes are being read here, and {wanted} more would leave too few of"
                f" {most} (max_open_request_bytes) to others: try again later",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._set(wanted)

    def keep(self, count: int) -> None:
        """Hold no more than ``count`` bytes from now on."""
        self._set(min(count, self._count))

    def release(self) -> None:
        """Hold nothing any more."""
        self._set(0)

    def _set(self, count: int) -> None:
        self._of_all.num_bytes += count - self._count
        self._count = count
