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
ARRIVAL_TIMEOUT_S = 60.0
"""As for HTTP."""

Message = GenerateRequest | LongRequest


class Arrivals:
    """Turns of calls whose messages are read. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_READ_AT_ONCE)

    async def receive(self, requests: AsyncIterator[Message], held: HeldBytes) -> Message:
        """The message of a call, whose bytes are held from now on; ``CapacityError`` while others hold too many,
        ``InvalidRequestError`` for a call without a message, or with one that does not arrive.
        """
        async with self._turns:
            reading = asyncio.ensure_future(only_message(requests))
            try:
                await asyncio.wait((reading,), timeout=SLOW_S)
                if reading.done():
                    held.take(_size(reading.result()))
                    return reading.result()
                held.take(MAX_REQUEST_BYTES)
            except BaseException:
                reading.cancel()
                raise
        try:
            message = await asyncio.wait_for(reading, ARRIVAL_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequestError("request", f"has not arrived within {ARRIVAL_TIMEOUT_S:g} s") from None
        held.keep(_size(message))
        return message


def _size(message: Message) -> int:
    return len(message.data) if isinstance(message, LongRequest) else message.ByteSize()
