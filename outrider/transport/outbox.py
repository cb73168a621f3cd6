"""Messages that wait to be written to a stream: put without waiting, taken one by one.

Readers never wait for writers. The bound is far above what a link's rules allow (one command a session is outstanding);
passing it means that the other side has stopped reading, and the link is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")

MAX_WAITING = 10_000


class Outbox(Generic[MessageT]):
    """Belongs to one event loop and one taker."""

    def __init__(self) -> None:
        self._waiting: deque[MessageT] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.num_put = 0
        """Messages ever queued."""

    @property
    def is_empty(self) -> bool:
        """Whether all messages were taken."""
        return not self._waiting

    def put(self, message: MessageT) -> bool:
        """Queue a message; False when too many wait or the box is closed."""
        if self._closed or len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(message)
        self.num_put += 1
        self._changed.set()
        return True

    def close(self) -> None:
        """No more will be put; what waits is still taken."""
        self._closed = True
        self._changed.set()

    async def take(self) -> AsyncGenerator[MessageT, None]:
        """All messages in order, until the box is closed and empty."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
