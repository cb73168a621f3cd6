"""The ports over gRPC: a draft or a target that runs elsewhere. One bidirectional stream is one link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from outrider.errors import LoadingError, TlsError, UnavailableError
from outrider.limits import LINK_ITEMS
from outrider.ports import DraftCommand, DraftEvent, DraftLink, TargetCommand, TargetEvent, TargetLink
from outrider.transport.channels import MAX_LINK_MESSAGE_BYTES, open_channel
from outrider.transport.convert.commands import draft_commands_to_proto, target_commands_to_proto
from outrider.transport.convert.describing import description_from_proto
from outrider.transport.convert.events import draft_events_from_proto, target_events_from_proto
from outrider.transport.link.heartbeats import CAPABILITY as HEARTBEATS
from outrider.transport.link.heartbeats import (
    DEFAULT_LINK_TIMEOUT_S,
    MIN_INTERVALS,
)
from outrider.transport.link.remote_link import RemoteLink
from outrider.transport.link.versions import METADATA as VERSION
from outrider.transport.link.versions import check_service
from outrider.transport.malformed import tolerant_of_link
from outrider.transport.security import OPEN_CLIENT, ClientSecurity
from outrider.transport.security.explaining import explain
from outrider.transport.status import translating_errors
from outrider.types import ModelDescription, PeerAddress
from outrider.v1 import link_pb2 as pb
from outrider.v1.link_pb2_grpc import DraftServiceStub, TargetServiceStub

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a service to answer its first call."""
FIRST_ATTEMPT_S = 1.0
"""Longest time of the first attempts to connect; it doubles with each failure up to the timeout. Where packets were
lost for a while only a new attempt gets through."""
MAX_BACKOFF_MS = 120
"""Longest pause between two attempts to connect: a service that is back is taken up at once, and a refused attempt
costs little.
"""
LOADING_WAIT_S = 2.0
"""Longest silence of a service that loads, before it is asked again."""


class _RemotePort:
    """Base of both ports: an address and how it is reached."""

    def __init__(
        self,
        address: str,
        security: ClientSecurity = OPEN_CLIENT,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        link_timeout_s: float = DEFAULT_LINK_TIMEOUT_S,
    ) -> None:
        """``link_timeout_s``: the silence after which a link is broken, of a service that sends heartbeats."""
        self.address = address
        self._link_timeout_s = link_timeout_s
        self._heartbeat_interval_s = 0.0
        """Heartbeat interval as last described; 0: none are sent."""
        self._is_loading = False
        """Loading flag as last described."""
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
        """The cause of a channel's failure, from a call that does not wait."""
        try:
            await HealthStub(channel).Check(HealthCheckRequest(), timeout=self._connect_timeout_s)
        except grpc.RpcError as error:
            tls = self._security.tls_for(self.address)
            trouble = await asyncio.to_thread(explain, error.details() or "", self.address, tls)
            if trouble is not None:
                raise TlsError(trouble) from error

    def _link_metadata(self) -> list[tuple[str, str]]:
        return [*(self._security.metadata() or ()), HEARTBEATS, VERSION]

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
            check_service(self.address, message.version)
            description = description_from_proto(message)
            self._heartbeat_interval_s = description.heartbeat_interval_ms / 1000
            return replace(description, peer_address=self.peer_address)
        except LoadingError:
            self._is_loading = True
            raise
        finally:
            await channel.close()

    @property
    def peer_address(self) -> PeerAddress | None:
        """Address for peers of the service; None for a socket file."""
        if self.address.startswith("unix:"):
            return None
        tls = self._security.tls_for(self.address)
        return PeerAddress(self.address, "" if tls is None else tls.server_name or "")

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
        response_deserializer=tolerant_of_link(events.FromString, events.DESCRIPTOR, LINK_ITEMS),
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
            heartbeat=pb.TargetCommands(heartbeat=pb.Heartbeat()),
            silence_timeout_s=self._silence_timeout_s(),
            is_heartbeat_announced=self._heartbeat_interval_s > 0,
        )
        return link
