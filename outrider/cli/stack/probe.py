"""Health probe of a service within a bounded time: over gRPC at an address, or over HTTP at a URL."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from outrider.addresses import split_address

CALL_TIMEOUT_S = 2.0
"""Longest wait for a health answer; a service that is busy for longer counts as not ready."""


async def is_serving(address: str, *, waits: bool = False) -> bool:
    """True if a server answers that it is SERVING, or 200 for a URL.

    For tcp://PLACE, only a connection is tested. ``waits``: a server over gRPC that answers otherwise gets
    ``CALL_TIMEOUT_S`` more to become SERVING: a connection for each question costs a service that loads time.
    """
    if address.startswith("http://"):
        return await _answers_200(address)
    if address.startswith("tcp://"):
        return await _is_listening(address.removeprefix("tcp://"))
    # A refused connection is told by a bare socket at once, and leaves no gRPC backoff behind for the next question.
    return await _is_listening(address) and await _says_serving(address, waits=waits)


async def _answers_200(url: str) -> bool:
    place, _, path = url.removeprefix("http://").partition("/")
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            reader, writer = await _connect(place)
            try:
                writer.write(f"GET /{path} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _is_listening(address: str) -> bool:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            _, writer = await _connect(address)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, port = split_address(address)
    return await asyncio.open_connection(host, int(port))


async def _says_serving(address: str, *, waits: bool) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # not part of the base install

    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    serving, request = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            if (await health.Check(request, timeout=CALL_TIMEOUT_S)).status == serving:
                return True
            if waits:
                async for answer in health.Watch(request, timeout=CALL_TIMEOUT_S):
                    if answer.status == serving:
                        return True
        except grpc.aio.AioRpcError:
            pass
    return False
