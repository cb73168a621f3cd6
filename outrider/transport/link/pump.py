"""The service's end of a link's stream: commands into a link of this process, its events out.

Reading and writing are independent. Owns what the values of a link do not show: messages within their limit,
heartbeats, and that the link is closed however the stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc.aio

from outrider.errors import InvalidRequestError, ProtocolError, UnavailableError
from outrider.ports import EventBatch, Link, Release
from outrider.transport.link.heartbeats import HEARTBEAT_INTERVAL_S, SilenceWatch
from outrider.transport.link.splitting import split_events

_log = logging.getLogger(__name__)

LAST_WRITE_S = 1.0
"""Longest wait of a stream's end for a heartbeat that is being written: to a peer that is gone it takes longer."""


class LinkPump:
    """One stream. Messages are generated types, which share no base: hence ``Any``."""

    def __init__(
        self,
        link: Link[Any, Any],
        decode: Callable[[Any], Any],
        encode: Callable[..., Any],
        *,
        max_message_bytes: int,
        beat: Callable[[int], Awaitable[None]] | None = None,
        silence_timeout_s: float | None = None,
    ) -> None:
        """``encode`` takes a batch. ``beat`` writes a heartbeat with the number of
        messages read; None: none are sent. ``silence_timeout_s``: after how long a silence the other end is gone;
        None: it is not watched.
        """
        self._link = link
        self._decode, self._encode = decode, encode
        self._max_message_bytes = max_message_bytes
        self._beat = beat
        self._num_received = 0
        self._writing = asyncio.Lock()
        """A stream takes one message at a time."""
        self._silence: UnavailableError | None = None
        self._closing: asyncio.Future[None] | None = None
        self._call: asyncio.Task[Any] | None = None
        self._ending: asyncio.TimerHandle | None = None
        """Timer that ends the call when its caller is silent."""
        self._watch = None if silence_timeout_s is None else SilenceWatch(silence_timeout_s, self._on_silent)

    async def run(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """The messages to send; the first side to end or fail ends both."""
        events = self._link.events()
        self._call = asyncio.current_task()
        reading = asyncio.create_task(self._read(requests))
        beating = asyncio.create_task(self._send_heartbeats())
        try:
            async for batch in events:
                for message in self._messages(batch):
                    async with self._writing:
                        yield message
            if self._silence is not None:
                raise self._silence
            await reading
        finally:
            if self._ending is not None:
                self._ending.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                # A command that cannot be read is the caller's to hear of, not this clean-up's.
                await asyncio.wait([reading])
            await self._link.close()
            await self._stop_heartbeats(beating)

    def _messages(self, batch: EventBatch[Any]) -> Iterator[Any]:
        split = split_events(self._encode(batch), self._max_message_bytes)
        if split.failed:
            # What cannot be told has ended for the other end: it has for this one too.
            self._link.send([Release(session, generation) for session, generation in split.failed])
        return iter(split.messages)

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        """Read until the caller half-closes or sends what cannot be read; either way the link is over."""
        if self._watch is not None:
            self._watch.start()
        try:
            async for message in requests:
                self._num_received += 1
                if self._watch is not None:
                    self._watch.note_received()
                if message.commands:
                    self._link.send(self._read_commands(message))
        finally:
            if self._watch is not None:
                self._watch.stop()
            await self._link.close()

    def _read_commands(self, message: Any) -> Any:  # noqa: ANN401
        """The commands of a message; ``InvalidRequestError`` for a broken contract, which is the caller's fault."""
        try:
            return self._decode(message)
        except ProtocolError as error:
            raise InvalidRequestError("commands", str(error)) from error

    async def _send_heartbeats(self) -> None:
        """Send heartbeats at regular intervals, between other messages."""
        # A stream that has ended takes no heartbeat; its reader gets the error.
        with contextlib.suppress(grpc.aio.BaseError):
            while self._beat is not None:
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)
                async with self._writing:
                    await self._beat(self._num_received)

    async def _stop_heartbeats(self, beating: asyncio.Task[None]) -> None:
        """Stop heartbeats between two of them: a stream that ends while a message is being written ends with an
        internal error of gRPC.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_S), self._writing:
                beating.cancel()
        beating.cancel()

    def _on_silent(self, timeout_s: float) -> None:
        """Release the sessions now, even while a message to the other end cannot be written."""
        self._silence = UnavailableError(f"nothing was received from the coordinator for {timeout_s:g} s")
        _log.warning("%s: its sessions are released", self._silence)
        self._closing = asyncio.ensure_future(self._link.close())
        if self._call is not None:
            # A message that the caller takes no byte of would keep the call open, and what has come on it.
            self._ending = asyncio.get_running_loop().call_later(LAST_WRITE_S, self._call.cancel)
