"""Arrivals: the messages of public requests, of which a few are read at the same time.

gRPC takes the first 64 KiB of a call and no more until its message is asked for; then it holds whatever has come of it.
Hundreds of large requests that are all asked for at once would be held whole before any of them is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outrider.errors import InvalidRequestError
from outrider.open_requests import HeldBytes
from outrider.transport.channels import MAX_REQUEST_BYTES
from outrider.transport.long_requests import LongRequest
from outrider.transport.malformed import only_message
from outrider.v1.generation_pb2 import GenerateRequest

MAX_READ_AT_ONCE = 8
SLOW_S = 1.0
"""After which a message that is still on its way gives its turn to another, and counts as the largest there can be."""
BUSY_S = 0.1
"""The same, while other calls wait for their turn: calls that send nothing would hold up all others."""
ARRIVAL_TIMEOUT_S = 60.0
"""As for HTTP."""

Message = GenerateRequest | LongRequest


class Arrivals:
    """Turns of calls whose messages are read. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_READ_AT_ONCE)
        self._num_calls = 0
        """Calls that have a turn, or wait for one."""

    async def receive(self, requests: AsyncIterator[Message], held: HeldBytes) -> Message:
        """The message of a call, whose bytes are held from now on; ``CapacityError`` while others hold too many,
        ``InvalidRequestError`` for a call without a message, or with one that does not arrive.
        """
        self._num_calls += 1
        try:
            async with self._turns:
                reading = await self._begun(requests, held)
        finally:
            self._num_calls -= 1
        if reading.done():
            return reading.result()
        try:
            message = await asyncio.wait_for(reading, ARRIVAL_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequestError("request", f"has not arrived within {ARRIVAL_TIMEOUT_S:g} s") from None
        held.keep(_size(message))
        return message

    async def _begun(self, requests: AsyncIterator[Message], held: HeldBytes) -> asyncio.Future[Message]:
        """The reading of a message that has arrived, or is slow."""
        reading = asyncio.ensure_future(only_message(requests))
        is_busy = self._num_calls > MAX_READ_AT_ONCE
        try:
            await asyncio.wait((reading,), timeout=BUSY_S if is_busy else SLOW_S)
            held.take(_size(reading.result()) if reading.done() else MAX_REQUEST_BYTES)
        except BaseException:
            reading.cancel()
            raise
        return reading


def _size(message: Message) -> int:
    return len(message.data) if isinstance(message, LongRequest) else message.ByteSize()
