"""Threads: long work on texts, beside the event loop, for a bounded number of requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

MOST_THREADS = 4
"""Texts that are tokenized in threads at the same time."""


class Threads:
    """Work in threads, of which each holds a request. Nothing waits in the executor's own queue, which keeps what was
    cancelled; a thread whose caller is gone keeps its turn until it has ended. Belongs to one event loop.
    """

    def __init__(self, most: int = MOST_THREADS) -> None:
        self._turns = asyncio.Semaphore(most)

    async def call(self, work: Callable[[], ResultT], *, in_thread: bool) -> ResultT:
        """The result of the work, done at once or in a thread when one is free; its errors are raised."""
        if not in_thread:
            return work()
        await self._turns.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        working.add_done_callback(self._ended)
        return await asyncio.shield(working)

    def _ended(self, working: asyncio.Future[Any]) -> None:
        self._turns.release()
        if not working.cancelled():
            working.exception()  # its caller may be gone
