"""The ports over gRPC: a draft or a target that runs elsewhere.

One bidirectional stream is one link. Knows the wire and nothing of what travels on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from numpy.typing import NDArray

from outrider.errors import LoadingError, OutriderError, ProtocolError, TlsError, UnavailableError
from outrider.limits import LINK_FIELDS
from outrider.ports import DraftCommand, DraftEvent, DraftLink, EventBatch, TargetCommand, TargetEvent, TargetLink
from outrider.transport.channels import MAX_LINK_MESSAGE_BYTES, open_channel
from outrider.transport.convert.arrays import Fetch, fetch_nothing
from outrider.transport.convert.columns import CAPABILITY as COLUMNS
from outrider.transport.convert.commands import draft_commands_to_proto, target_commands_to_proto
from outrider.transport.convert.describing import description_from_proto
from outrider.transport.convert.events import draft_events_from_proto, target_events_from_proto
from outrider.transport.field_counts import check_num_fields
from outrider.transport.heartbeats import CAPABILITY as HEARTBEATS
from outrider.transport.heartbeats import (
    DEFAULT_LINK_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    MIN_INTERVALS,
    SilenceWatch,
)
from outrider.transport.malformed import Malformed, tolerant
from outrider.transport.outbox import Outbox
from outrider.transport.planes import CAPABILITY
from outrider.transport.planes.reader import SharedReader
from outrider.transport.security import OPEN_CLIENT, ClientSecurity
from outrider.transport.security.explaining import explain
from outrider.transport.splitting import split_commands
from outrider.transport.status import translating_errors
from outrider.types import ModelDescription
from outrider.v1 import link_pb2 as pb
from outrider.v1.link_pb2_grpc import DraftServiceStub, TargetServiceStub
from outrider.v1.tensor_pb2 import PlaneAnswer, SharedMemoryRegion

_log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

CONNECT_TIMEOUT_S = 5.0
FIRST_ATTEMPT_S = 1.0
"""How long the first attempts to connect may take; it doubles with each failure up to the timeout. Where packets were
lost for a while only a new attempt gets through."""
MAX_BACKOFF_MS = 120
"""Between two attempts to connect: a service that is back is taken up at once, and a refused attempt costs little."""
LOADING_WAIT_S = 2.0
"""How long a service that loads may say nothing before it is asked again."""
FAREWELL_S = 1.0
"""How long ``close`` waits for the service to say that the link's sessions are released."""


class RemoteLink(Generic[CommandT, EventT]):
    """``ports.Link`` over one bidirectional stream on a separate channel."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        attach: Callable[..., Any],
        encode: Callable[[Sequence[CommandT]], Any],
        decode: Callable[[Any, Fetch], EventBatch[EventT]],
        *,
        answer_offer: Callable[[bytes], Any],
        heartbeat: Any,  # noqa: ANN401 - generated types share no base
        silence_timeout_s: float = DEFAULT_LINK_TIMEOUT_S,
        is_heartbeat_announced: bool = False,
    ) -> None:
        """``answer_offer`` makes the message that says what was found in an offered file; ``heartbeat`` is a message.

        The link breaks when nothing is heard for ``silence_timeout_s`` of a service that announced heartbeats, or has
        sent one, and when its heartbeats say for as long that it receives none of the messages on their way to it.
        """
        self._address = address
        self._channel = channel
        self._encode, self._decode, self._answer_offer = encode, decode, answer_offer
        self._reader: SharedReader | None = None
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
        messages = split_commands(commands, self._encode, MAX_LINK_MESSAGE_BYTES)
        if not all(self._outbox.put(message) for message in messages):
            # A command that was lost is a link that is lost: the reader has to hear of it too.
            raise self._give_up(f"{self._address} has stopped reading the link")

    async def events(self) -> AsyncIterator[EventBatch[EventT]]:
        """The events, for one reader; ends after ``close``, raises ``UnavailableError`` if the link breaks."""
        self._reading = True
        self._watch_if_expected()
        try:
            with translating_errors(self._address):
                async for message in self._call:
                    self._watch.heard()
                    if isinstance(message, Malformed):
                        raise ProtocolError(f"{self._address} broke the contract of the link: {message.error}")
                    if message.HasField("heartbeat"):
                        self._on_heartbeat(message.heartbeat)
                    elif message.HasField("plane_offer"):
                        self._on_offer(message.plane_offer.name)
                    else:
                        self._reading = False
                        self._pause()
                        yield self._decode(message, self._fetch)
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

    @property
    def tensor_plane(self) -> str:
        """How large tensors come over this link: "shared_memory" or "inline"."""
        return "inline" if self._reader is None else "shared_memory"

    def _on_offer(self, name: str) -> None:
        """The service offers a file; it is used if this process sees it."""
        self._reader = SharedReader.open(name)
        self._outbox.put(self._answer_offer(b"" if self._reader is None else self._reader.token))
        _log.info("tensors of %s come by %s", self._address, self.tensor_plane)

    def _fetch(self, region: SharedMemoryRegion) -> NDArray[np.uint8]:
        return fetch_nothing(region) if self._reader is None else self._reader.fetch(region)

    async def _send_heartbeats(self, heartbeat: Any) -> None:  # noqa: ANN401
        """At regular intervals, while earlier messages are being taken."""
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
        if not heartbeat.HasField("num_received_messages"):
            return  # a service of an older version
        self._receipts.start()
        num_received = heartbeat.num_received_messages
        if num_received > self._num_received or num_received >= self._outbox.num_put:
            self._receipts.heard()
        self._num_received = num_received

    def _pause(self) -> None:
        self._watch.pause()
        self._receipts.pause()

    def _resume(self) -> None:
        self._watch.resume()
        self._receipts.resume()

    def _on_lost_messages(self, timeout_s: float) -> None:
        self._give_up(f"{self._address} has received nothing of what was sent to it for {timeout_s:g} s")

    def _on_silent(self, timeout_s: float) -> None:
        self._give_up(f"nothing was received from {self._address} for {timeout_s:g} s")

    def _give_up(self, reason: str) -> UnavailableError:
        """Break the link from this end, for the reader and for senders."""
        self._gave_up = True
        self._broken = UnavailableError(reason)
        self._call.cancel()
        return self._broken

    def _on_done(self, call: object) -> None:
        """A sender hears of a break even while nobody reads; why it broke is for the reader to say."""
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
                async with asyncio.timeout(FAREWELL_S):
                    await self._until_done()
        self._call.cancel()
        # What a broken link raised refers to the link, so only the collector would close the file, and it comes rarely.
        self._reader = None
        await self._channel.close()

    async def _until_done(self) -> None:
        """A call is done when all that came is read, so it is read here when nobody else does."""
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


class _RemotePort:
    """What both ports share: an address and how it is reached."""

    def __init__(
        self,
        address: str,
        security: ClientSecurity = OPEN_CLIENT,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        link_timeout_s: float = DEFAULT_LINK_TIMEOUT_S,
        shares_memory: bool = True,
    ) -> None:
        """``link_timeout_s``: the silence after which a link is broken, of a service that sends heartbeats.

        ``shares_memory``: whether a service of the same host may hand large tensors over in shared memory.
        """
        self.address = address
        self._link_timeout_s = link_timeout_s
        self._heartbeat_interval_s = 0.0
        """As last described; 0: none are sent."""
        self._is_loading = False
        """As last described."""
        self._shares_memory = shares_memory
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        self._attempt_s = FIRST_ATTEMPT_S

    async def _connect(self) -> grpc.aio.Channel:
        channel = open_channel(
            self.address,
            self._security,
            max_message_bytes=MAX_LINK_MESSAGE_BYTES,
            connect_attempt_ms=round(1000 * min(self._attempt_s, self._connect_timeout_s)),
            max_backoff_ms=MAX_BACKOFF_MS,
        )
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._until_ready(channel)
            self._attempt_s = FIRST_ATTEMPT_S
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                self._attempt_s = min(2 * self._attempt_s, self._connect_timeout_s)
                raise UnavailableError(f"{self.address} did not answer within {self._connect_timeout_s:g} s") from error
            raise
        return channel

    async def _until_ready(self, channel: grpc.aio.Channel) -> None:
        """Raises ``UnavailableError`` for what only another setting mends; all else may pass, so it is waited out."""
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self._raise_if_insecure(channel)
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def _raise_if_insecure(self, channel: grpc.aio.Channel) -> None:
        """A failed channel tells why to whoever calls on it without waiting."""
        try:
            await HealthStub(channel).Check(HealthCheckRequest(), timeout=self._connect_timeout_s)
        except grpc.RpcError as error:
            tls = self._security.tls_for(self.address)
            trouble = await asyncio.to_thread(explain, error.details() or "", self.address, tls)
            if trouble is not None:
                raise TlsError(trouble) from error

    def _link_metadata(self) -> list[tuple[str, str]]:
        return [*(self._security.metadata() or ()), HEARTBEATS, COLUMNS, *([CAPABILITY] if self._shares_memory else [])]

    def _silence_timeout_s(self) -> float:
        return max(self._link_timeout_s, MIN_INTERVALS * self._heartbeat_interval_s)

    async def _describe(self, make_stub: Callable[[grpc.aio.Channel], Any]) -> ModelDescription:
        channel = await self._connect()
        try:
            if self._is_loading:
                await self._until_serving(channel)
            self._is_loading = False
            with translating_errors(self.address, self._security):
                message = await make_stub(channel).Describe(
                    pb.DescribeRequest(), timeout=self._connect_timeout_s, metadata=self._security.metadata()
                )
            description = description_from_proto(message)
            self._heartbeat_interval_s = description.heartbeat_interval_ms / 1000
            return description
        except LoadingError:
            self._is_loading = True
            raise
        finally:
            await channel.close()

    async def _until_serving(self, channel: grpc.aio.Channel) -> None:
        """Return as soon as the service's health says SERVING, and after a while in any case."""
        with contextlib.suppress(grpc.RpcError, TimeoutError):
            async with asyncio.timeout(LOADING_WAIT_S):
                async for answer in HealthStub(channel).Watch(HealthCheckRequest()):
                    if answer.status == HealthCheckResponse.SERVING:
                        return


def _attach(channel: grpc.aio.Channel, service: str, commands: Any, events: Any) -> Callable[..., Any]:  # noqa: ANN401
    """The stub's ``Attach``, which checks how many fields a message has before it is parsed."""
    return channel.stream_stream(
        f"/{pb.DESCRIPTOR.services_by_name[service].full_name}/Attach",
        request_serializer=commands.SerializeToString,
        response_deserializer=tolerant(
            events.FromString, partial(check_num_fields, message=events.DESCRIPTOR, most=LINK_FIELDS)
        ),
    )


class RemoteDraft(_RemotePort):
    """``ports.Draft`` at "host:port" or "unix:/path"."""

    async def describe(self) -> ModelDescription:
        """Return the description of the draft; ``UnavailableError`` if it cannot be reached, ``LoadingError`` while it
        loads.

        After a ``LoadingError`` the next call waits until the draft serves, for a bounded time.
        """
        return await self._describe(DraftServiceStub)

    async def attach(self) -> DraftLink:
        """Open a link; ``UnavailableError`` if the draft cannot be reached."""
        channel = await self._connect()
        attach = _attach(channel, "DraftService", pb.DraftCommands, pb.DraftEvents)
        link: RemoteLink[DraftCommand, DraftEvent] = RemoteLink(
            self.address,
            channel,
            partial(attach, metadata=self._link_metadata()),
            draft_commands_to_proto,
            draft_events_from_proto,
            answer_offer=lambda token: pb.DraftCommands(plane_answer=PlaneAnswer(token=token)),
            heartbeat=pb.DraftCommands(heartbeat=pb.Heartbeat()),
            silence_timeout_s=self._silence_timeout_s(),
            is_heartbeat_announced=self._heartbeat_interval_s > 0,
        )
        return link


class RemoteTarget(_RemotePort):
    """``ports.Target`` at "host:port" or "unix:/path"."""

    async def describe(self) -> ModelDescription:
        """Return the description of the target; ``UnavailableError`` if it cannot be reached, ``LoadingError`` while it
        loads.

        After a ``LoadingError`` the next call waits until the target serves, for a bounded time.
        """
        return await self._describe(TargetServiceStub)

    async def attach(self) -> TargetLink:
        """Open a link; ``UnavailableError`` if the target cannot be reached."""
        channel = await self._connect()
        attach = _attach(channel, "TargetService", pb.TargetCommands, pb.TargetEvents)
        link: RemoteLink[TargetCommand, TargetEvent] = RemoteLink(
            self.address,
            channel,
            partial(attach, metadata=self._link_metadata()),
            target_commands_to_proto,
            target_events_from_proto,
            answer_offer=lambda token: pb.TargetCommands(plane_answer=PlaneAnswer(token=token)),
            heartbeat=pb.TargetCommands(heartbeat=pb.Heartbeat()),
            silence_timeout_s=self._silence_timeout_s(),
            is_heartbeat_announced=self._heartbeat_interval_s > 0,
        )
        return link
