"""Arrivals: the messages of public requests, which are read in turns and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outrider.errors import InvalidRequestError
from outrider.open_requests import HeldBytes
from outrider.transport.channels import MAX_REQUEST_BYTES
from outrider.transport.link.counts import LinkCounts
from outrider.transport.malformed import only_message
from outrider.transport.turns import Turns
from outrider.v1.generation_pb2 import GenerateRequest

MAX_READ_AT_ONCE = 8
"""Long messages read at a time, which bounds their memory."""
SLOW_S = 1.0
"""Time after which a message still on its way gives its turn to another and counts as the largest possible."""
BUSY_S = 0.1
"""The same, while other calls wait for their turn."""
MAX_SLOW_PER_HOST = 4
"""Half of ``max_open_request_bytes`` by default: calls of one host that send nothing leave the rest to other calls."""
ARRIVAL_TIMEOUT_S = 60.0
"""Time limit of an arrival, the same as for HTTP."""


class Arrivals:
    """Reads messages in turns. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = Turns(MAX_READ_AT_ONCE, busy_s=BUSY_S, longest_s=SLOW_S)
        self._slow_ones = LinkCounts(MAX_SLOW_PER_HOST, "requests that arrive slowly")

    async def receive(self, requests: AsyncIterator[GenerateRequest], held: HeldBytes, peer: str) -> GenerateRequest:
        """The message of a call of ``peer``, whose bytes are held from now on; ``CapacityError`` while others hold too
        many, ``InvalidRequestError`` for a call without a message, or with one that does not arrive.
        """
        begun: list[asyncio.Future[GenerateRequest]] = []
        try:
            async with self._turns.taken(peer):
                begun.append(asyncio.ensure_future(only_message(requests)))
                message = await asyncio.shield(begun[0])
                held.take(message.ByteSize())
                return message
        except TimeoutError:
            return await self._slow(begun[0], held, peer)
        finally:
            for reading in begun:
                reading.cancel()

    async def _slow(self, reading: asyncio.Future[GenerateRequest], held: HeldBytes, peer: str) -> GenerateRequest:
        if reading.done():  # it came as its turn ended
            held.take((message := reading.result()).ByteSize())
            return message
        held.take(MAX_REQUEST_BYTES)
        with self._slow_ones.entered(peer):
            try:
                async with asyncio.timeout(ARRIVAL_TIMEOUT_S):  # wait_for of 3.11 swallows a cancellation
                    message = await reading
            except TimeoutError:
                raise InvalidRequestError("request", f"has not arrived within {ARRIVAL_TIMEOUT_S:g} s") from None
        held.keep(message.ByteSize())
        return message
