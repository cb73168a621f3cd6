"""Asks an address the standard health question, within a bounded time."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0


async def is_serving(address: str) -> bool:
    """Whether a server is there and says SERVING for itself as a whole."""
    # A refused connection is told by a bare socket at once, and leaves no gRPC backoff behind for the next question.
    return await _is_listening(address) and await _says_serving(address)


async def _is_listening(address: str) -> bool:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
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
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


async def _says_serving(address: str) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
