"""Outbound queue of a stream: ``put`` does not wait, ``take`` returns messages in order.

Readers never wait for writers. The limit is far above what a link allows (one outstanding command per session).
Exceeding it means that the peer has stopped reading, and the link is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")

MAX_WAITING = 10_000
"""Messages that wait for a slow peer; a link that has more is closed."""


class Outbox(Generic[MessageT]):
    """Queue of one event loop and one reader."""

    def __init__(self) -> None:
        self._waiting: deque[MessageT] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.num_put = 0
        """Messages ever queued."""

    @property
    def is_empty(self) -> bool:
        """True if all messages were taken."""
        return not self._waiting

    def put(self, message: MessageT) -> bool:
        """Queue a message; False if the queue is full or closed."""
        if self._closed or len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(message)
        self.num_put += 1
        self._changed.set()
        return True

    def close(self) -> None:
        """Accept no more messages; queued ones are still taken."""
        self._closed = True
        self._changed.set()

    async def take(self) -> AsyncGenerator[MessageT, None]:
        """Yield all messages in order, until the queue is closed and empty."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
