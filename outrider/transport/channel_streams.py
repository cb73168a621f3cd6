"""Proposal channels between hosts: the bytes of a socket as messages of a gRPC stream, on the target's own port.

Such a channel has the security, names and keepalive of a link. Both ends of the channel see a socket, as on one host;
what is not read is held back from end to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import partial

import grpc

from outrider.errors import OutriderError
from outrider.transport.channels import keepalive, open_blocking_channel
from outrider.transport.security import ClientSecurity
from outrider.transport.status import translating_errors
from outrider.types import PeerAddress
from outrider.v1 import link_pb2
from outrider.v1.channel_pb2 import ChannelBytes

_log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 1 << 16
_METHOD = f"/{link_pb2.DESCRIPTOR.services_by_name['TargetService'].full_name}/OpenChannel"
PATH_KEEPALIVE = keepalive(1_000, 2_000)
"""A path that is cut is noticed as soon as a link's is: a step may wait for proposals on it."""


async def carry_channel(
    requests: AsyncIterator[ChannelBytes], admit: Callable[[socket.socket], None]
) -> AsyncGenerator[ChannelBytes, None]:
    """Messages of the target's end of a channel, until either end closes; ``admit`` takes its socket at once."""
    loop = asyncio.get_running_loop()
    carried, given = socket.socketpair()
    carried.setblocking(False)
    try:
        admit(given)
    except OutriderError:
        given.close()
        carried.close()
        raise
    receiving = asyncio.create_task(_receive(requests, carried))
    try:
        with contextlib.suppress(ConnectionResetError):  # the target has closed its end before it read all
            while content := await loop.sock_recv(carried, MAX_PIECE_BYTES):
                yield ChannelBytes(content=content)
    finally:
        receiving.cancel()
        await asyncio.wait([receiving])
        carried.close()


async def _receive(requests: AsyncIterator[ChannelBytes], carried: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for piece in requests:
            await loop.sock_sendall(carried, piece.content)
    finally:
        with contextlib.suppress(OSError):
            carried.shutdown(socket.SHUT_RDWR)


def call_target(security: ClientSecurity, target: PeerAddress) -> socket.socket:
    """Draft's end of a channel to a target, which is connected to in the background: the socket ends if that fails.
    ``ConfigError`` for unusable files, and for a token that the network could read.
    """
    named = security.named(target.server_name)
    channel = open_blocking_channel(target.address, named, more=PATH_KEEPALIVE)
    carried, given = socket.socketpair()
    stream = channel.stream_stream(
        _METHOD, request_serializer=ChannelBytes.SerializeToString, response_deserializer=ChannelBytes.FromString
    )
    call = stream(_pieces_of(carried.dup()), metadata=named.metadata())
    deliver = partial(_deliver, call, carried, translating_errors(target.address, named))
    threading.Thread(target=_until_closed, args=(deliver, channel), name="channel-stream", daemon=True).start()
    return given


def _pieces_of(carried: socket.socket) -> Iterator[ChannelBytes]:
    """Messages of what the draft writes; read by gRPC's thread as fast as they leave."""
    with carried, contextlib.suppress(OSError):
        while content := carried.recv(MAX_PIECE_BYTES):
            yield ChannelBytes(content=content)


def _deliver(
    call: Iterator[ChannelBytes], carried: socket.socket, translating: contextlib.AbstractContextManager[None]
) -> None:
    """Write what the target sends, until either end closes."""
    try:
        with translating:
            for piece in call:
                carried.sendall(piece.content)
    except (OutriderError, OSError) as error:
        _log.info("a proposal channel between hosts has ended: %s", error)
    finally:
        with contextlib.suppress(OSError):
            carried.shutdown(socket.SHUT_RDWR)
        carried.close()


def _until_closed(deliver: Callable[[], None], channel: grpc.Channel) -> None:
    try:
        deliver()
    finally:
        channel.close()
