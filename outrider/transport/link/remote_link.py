"""Remote link: the caller's end of a link's stream. Knows the wire and nothing of what travels on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from outrider.errors import OutriderError, ProtocolError, UnavailableError
from outrider.limits import LONGEST_STALL_LIMIT_MS
from outrider.ports import EventBatch
from outrider.stalls import NO_STALL, Stall
from outrider.transport.channels import MAX_COMMANDS_BYTES
from outrider.transport.link.heartbeats import DEFAULT_LINK_TIMEOUT_S, HEARTBEAT_INTERVAL_S, SilenceWatch
from outrider.transport.link.outbox import Outbox
from outrider.transport.link.splitting import split_commands
from outrider.transport.malformed import Malformed, checked
from outrider.transport.status import translating_errors
from outrider.v1 import link_pb2 as pb

_log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

CLOSE_TIMEOUT_S = 1.0
"""Longest wait of ``close`` for the service to release the link's sessions."""


class RemoteLink(Generic[CommandT, EventT]):
    """``ports.Link`` over one bidirectional stream on a separate channel."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        attach: Callable[..., Any],
        encode: Callable[[Sequence[CommandT]], Any],
        decode: Callable[[Any], EventBatch[EventT]],
        *,
        heartbeat: Any,  # noqa: ANN401 - generated types share no base
        silence_timeout_s: float = DEFAULT_LINK_TIMEOUT_S,
        is_heartbeat_announced: bool = False,
    ) -> None:
        """``heartbeat`` is a message.

        The link breaks if nothing is received for ``silence_timeout_s`` of a service that announced heartbeats, or has
        sent one, when its heartbeats say for as long that it receives none of the messages on their way to it, and when
        they say that it hangs.
        """
        self._address = address
        self._channel = channel
        self._encode, self._decode = encode, decode
        self.num_pages_free: int | None = None
        """Free KV pages of the service, by its last heartbeat or forward."""
        self.stall = NO_STALL
        """Stall of the service, by its last heartbeat."""
        self._outbox: Outbox[Any] = Outbox()
        self._broken: UnavailableError | None = None
        self._closed = False
        self._gave_up = False
        self._reading = False
        self._done = asyncio.Event()
        self._watch = SilenceWatch(silence_timeout_s, self._on_silent)
        self._is_heartbeat_expected = is_heartbeat_announced
        self._num_received = 0
        """Our messages that the service has read, as its last heartbeat says."""
        self._receipts = SilenceWatch(silence_timeout_s, self._on_lost_messages)
        self._call = attach(self._outbox.take())
        self._call.add_done_callback(self._on_done)
        self._beating = asyncio.create_task(self._send_heartbeats(heartbeat))

    def send(self, commands: Sequence[CommandT]) -> None:
        """Queue one message and return at once; ``UnavailableError`` if the link has ended."""
        if self._broken is not None:
            raise UnavailableError(str(self._broken))
        if self._closed:
            raise UnavailableError(f"the link to {self._address} is closed")
        messages = split_commands(commands, self._encode, MAX_COMMANDS_BYTES)
        if not all(self._outbox.put(message) for message in messages):
            # A command that was lost is a link that is lost: the reader has to hear of it too.
            raise self.give_up(f"{self._address} has stopped reading the link")

    async def events(self) -> AsyncIterator[EventBatch[EventT]]:
        """The events, for one reader; ends after ``close``, raises ``UnavailableError`` if the link breaks."""
        self._reading = True
        self._watch_if_expected()
        try:
            with translating_errors(self._address):
                async for received in self._call:
                    self._watch.note_received()
                    message = await checked(received)
                    if isinstance(message, Malformed):
                        raise ProtocolError(f"{self._address} broke the contract of the link: {message.error}")
                    if message.HasField("heartbeat"):
                        self._on_heartbeat(message.heartbeat)
                    else:
                        self._reading = False
                        self._pause()
                        yield self._read_events(message)
                        self._resume()
                        self._reading = True
            raise UnavailableError(f"{self._address} ended the link")
        except (OutriderError, asyncio.CancelledError) as error:
            if self._closed:
                return
            if isinstance(error, asyncio.CancelledError):
                if self._gave_up and self._broken is not None:
                    raise self._broken from error
                raise
            self._broken = UnavailableError(f"the link to {self._address} broke: {error}")
            raise self._broken from error
        finally:
            self._reading = False
            self._watch.stop()
            self._receipts.stop()

    def _read_events(self, message: Any) -> EventBatch[EventT]:  # noqa: ANN401
        batch = self._decode(message)
        if batch.report is not None:
            self.num_pages_free = batch.report.num_pages_free
        return batch

    async def _send_heartbeats(self, heartbeat: Any) -> None:  # noqa: ANN401
        """Send heartbeats at regular intervals, while earlier messages are being taken."""
        while not self._done.is_set():
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            if self._outbox.is_empty:
                self._outbox.put(heartbeat)

    def _watch_if_expected(self) -> None:
        if self._is_heartbeat_expected:
            self._watch.start()

    def _on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        self._is_heartbeat_expected = True
        self._watch_if_expected()
        if heartbeat.HasField("num_pages_free"):
            self.num_pages_free = heartbeat.num_pages_free
        limit_ms = min(heartbeat.stall_limit_ms, LONGEST_STALL_LIMIT_MS)
        self.stall = Stall(heartbeat.stall_ms / 1000, limit_ms / 1000)
        if self.stall.is_hang:
            self.give_up(f"{self._address} hangs: no progress with its work for {self.stall.age_s:.1f} s")
        if not heartbeat.HasField("num_received_messages"):
            return  # a service of an older version
        self._receipts.start()
        num_received = heartbeat.num_received_messages
        if num_received > self._num_received or num_received >= self._outbox.num_put:
            self._receipts.note_received()
        self._num_received = num_received

    def _pause(self) -> None:
        self._watch.pause()
        self._receipts.pause()

    def _resume(self) -> None:
        self._watch.resume()
        self._receipts.resume()

    def _on_lost_messages(self, timeout_s: float) -> None:
        self.give_up(f"{self._address} has received nothing of what was sent to it for {timeout_s:g} s")

    def _on_silent(self, timeout_s: float) -> None:
        self.give_up(f"nothing was received from {self._address} for {timeout_s:g} s")

    def give_up(self, reason: str) -> UnavailableError:
        """Break the link from this end, for the reader and for senders."""
        self._gave_up = True
        self._broken = UnavailableError(reason)
        self._call.cancel()
        return self._broken

    def _on_done(self, call: object) -> None:
        """Tell the sender of a break also while there is no reader; the reader gets the cause."""
        if self._broken is None:
            self._broken = UnavailableError(f"the link to {self._address} is gone")
        self._done.set()

    async def close(self) -> None:
        """Release the link's sessions on the service; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._beating.cancel()
        self._outbox.close()
        # The service ends the stream when it has released what the link held; one that is silent is not waited for.
        if not self._gave_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._until_done()
        self._call.cancel()
        await self._channel.close()

    async def _until_done(self) -> None:
        """Read to the end of the call if there is no other reader: a call is done when all of its messages are read."""
        if not self._reading:
            try:
                async for _ in self._call:
                    pass
            except grpc.RpcError:
                pass  # how it ended is of no interest any more
            except asyncio.CancelledError:
                if not self._call.cancelled():
                    raise
        await self._done.wait()
