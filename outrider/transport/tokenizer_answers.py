"""Turns of ``GetTokenizer``: how many answers with files are on their way to one host at a time.

An answer has up to some megabytes, and stays in memory until its caller has read it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from outrider.transport.link.counts import host_of

MAX_ANSWERS_PER_HOST = 8
"""Large answers that are built for one host at a time."""

Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerAnswers:
    """Turns by host, in order. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._num_calls: dict[str, int] = {}

    async def take_turn(self, context: Context) -> None:
        """Wait for a turn, which ends with the call."""
        host = host_of(context.peer())
        turns = self._turns.setdefault(host, asyncio.Semaphore(MAX_ANSWERS_PER_HOST))
        self._num_calls[host] = self._num_calls.get(host, 0) + 1
        has_turn = False

        def leave(context: Context) -> None:
            if has_turn:
                turns.release()
            self._num_calls[host] -= 1
            if not self._num_calls[host]:
                del self._num_calls[host], self._turns[host]

        context.add_done_callback(leave)  # type: ignore[arg-type]
        await turns.acquire()
        has_turn = True
