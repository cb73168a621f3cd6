"""The service's end of a link's stream: commands into a link of this process, its events out.

Reading and writing are independent. Owns what the values of a link do not show: the offer of shared memory, messages
within their limit, and that the link is closed however the stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from outrider.ports import EventBatch, Link, Release
from outrider.transport.convert.arrays import place_nothing
from outrider.transport.planes import CAPABILITY, shared_file
from outrider.transport.planes.writer import SharedWriter
from outrider.transport.splitting import split_events
from outrider.types import ModelDescription


def with_planes(description: ModelDescription) -> ModelDescription:
    """The description, with the planes that this process can offer."""
    planes = ("shared_memory", "inline") if shared_file.is_available() else ("inline",)
    return replace(description, tensor_planes=planes)


def reads_shared_memory(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a caller says in its call's metadata that it would read an offered file."""
    return CAPABILITY in (metadata or ())


class LinkPump:
    """One stream. Messages are generated types, which share no base: hence ``Any``."""

    def __init__(
        self,
        link: Link[Any, Any],
        decode: Callable[[Any], Any],
        encode: Callable[..., Any],
        *,
        offer: Callable[[str], Any],
        shares_memory: bool,
        max_message_bytes: int,
    ) -> None:
        """``encode`` takes a batch and where its tensors may be placed, ``offer`` the name of a shared file.

        ``shares_memory``: whether the other end would read such a file.
        """
        self._link = link
        self._decode, self._encode, self._offer = decode, encode, offer
        self._max_message_bytes = max_message_bytes
        self._writer = SharedWriter() if shares_memory else None

    async def run(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """The messages to send; the first side to end or fail ends both."""
        events = self._link.events()
        reading = asyncio.create_task(self._read(requests))
        try:
            if self._writer is not None and self._writer.name:
                yield self._offer(self._writer.name)
            async for batch in events:
                for message in self._messages(batch):
                    yield message
            await reading
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                # A command that cannot be read is the caller's to hear of, not this clean-up's.
                await asyncio.wait([reading])
            await self._link.close()
            if self._writer is not None:
                self._writer.close()

    def _messages(self, batch: EventBatch[Any]) -> Iterator[Any]:
        split = split_events(
            self._encode(batch, place_nothing if self._writer is None else self._writer.place), self._max_message_bytes
        )
        if split.failed:
            # What cannot be told has ended for the other end: it has for this one too.
            self._link.send([Release(session, generation) for session, generation in split.failed])
        return iter(split.messages)

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        """Until the caller half-closes or sends what cannot be read; either way the link is over."""
        try:
            async for message in requests:
                if message.HasField("plane_answer") and self._writer is not None:
                    self._writer.confirm(message.plane_answer.token)
                if message.commands:
                    self._link.send(self._decode(message))
        finally:
            await self._link.close()
