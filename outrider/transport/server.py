"""A gRPC server with all that every one of ours has: health, reflection, statuses for errors, a polite end.

Health is per service name and under "" for the whole; "liveness" says SERVING from start to end and never follows
anything, so that an orchestrator does not restart a process for what is wrong elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import ConfigError
from outrider.ports import Draft, Target
from outrider.transport.channels import (
    KEEPALIVE,
    MAX_LINK_MESSAGE_BYTES,
    MAX_PUBLIC_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    Options,
    message_limits,
)
from outrider.transport.interceptor import ErrorInterceptor
from outrider.transport.servicers import DraftServicer, GenerationServicer, Generator, TargetServicer
from outrider.v1 import generation_pb2, link_pb2
from outrider.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from outrider.v1.link_pb2_grpc import add_DraftServiceServicer_to_server, add_TargetServiceServicer_to_server

LIVENESS = "liveness"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_OPTIONS: Options = [
    *KEEPALIVE,
    # Without this a second server binds the same port without a word, and calls go to either.
    ("grpc.so_reuseport", 0),
    # Clients ping an idle link to see whether we are there; that is welcome.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Server:
    """One listening server. ``set_serving`` is for whoever knows whether its service is ready."""

    def __init__(self, server: grpc.aio.Server, health_servicer: Any, service: str, address: str) -> None:  # noqa: ANN401
        self._server = server
        self._health = health_servicer
        self._service = service
        self._draining = False
        self.address = address
        """Where it listens, with the port that was chosen when 0 was asked for."""

    async def set_serving(self, serving: bool) -> None:
        """What health says of the service, and of the whole; never SERVING again once it drains."""
        status = SERVING if serving and not self._draining else NOT_SERVING
        for name in ("", self._service):
            await self._health.set(name, status)

    async def drain(self, *, delay_s: float, grace_s: float) -> None:
        """NOT_SERVING; after ``delay_s`` no new calls; running ones have ``grace_s`` to finish. Returns at the end."""
        self._draining = True
        await self.set_serving(False)
        await asyncio.sleep(delay_s)
        await self._server.stop(grace_s)

    async def stop(self) -> None:
        """End at once."""
        await self._server.stop(None)

    async def wait(self) -> None:
        """Until the server has ended."""
        await self._server.wait_for_termination()


async def serve_draft(draft: Draft, *, host: str, port: int) -> Server:
    """Listen for links to a draft; NOT_SERVING until ``set_serving``. ``ConfigError`` when the port is taken."""

    def add(server: grpc.aio.Server) -> None:
        add_DraftServiceServicer_to_server(DraftServicer(draft), server)

    return await _serve(
        add, _service_name(link_pb2, "DraftService"), host, port, message_limits(MAX_LINK_MESSAGE_BYTES)
    )


async def serve_target(target: Target, *, host: str, port: int) -> Server:
    """Listen for links to a target; NOT_SERVING until ``set_serving``. ``ConfigError`` when the port is taken."""

    def add(server: grpc.aio.Server) -> None:
        add_TargetServiceServicer_to_server(TargetServicer(target), server)

    return await _serve(
        add, _service_name(link_pb2, "TargetService"), host, port, message_limits(MAX_LINK_MESSAGE_BYTES)
    )


async def serve_generation(generator: Generator, *, host: str, port: int) -> Server:
    """Listen for users; NOT_SERVING until ``set_serving``. ``ConfigError`` when the port is taken."""

    def add(server: grpc.aio.Server) -> None:
        add_GenerationServiceServicer_to_server(GenerationServicer(generator), server)

    name = _service_name(generation_pb2, "GenerationService")
    limits = message_limits(MAX_PUBLIC_MESSAGE_BYTES, max_received_bytes=MAX_REQUEST_BYTES)
    return await _serve(add, name, host, port, limits)


def address_of(host: str, port: int) -> str:
    """Host and port joined; a host "unix:/path" is the whole address."""
    return host if host.startswith("unix:") else f"{host}:{port}"


def _service_name(module: Any, name: str) -> str:  # noqa: ANN401 - generated modules have no type
    full: str = module.DESCRIPTOR.services_by_name[name].full_name
    return full


async def _serve(add: Callable[[grpc.aio.Server], None], service: str, host: str, port: int, limits: Options) -> Server:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[*_OPTIONS, *limits])
    add(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((service, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    bound = _bind(server, host, port)
    await health_servicer.set(LIVENESS, SERVING)
    listening = Server(server, health_servicer, service, address_of(host, bound))
    await listening.set_serving(False)
    await server.start()
    return listening


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = address_of(host, port)
    in_use = ConfigError("port", f"cannot listen on {address}: it is in use, or is no address of this host")
    # gRPC takes a socket file from whoever listens there without a word.
    if host.startswith("unix:") and _is_answered(host.removeprefix("unix:")):
        raise in_use
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise in_use from error
    if bound == 0:
        raise in_use
    return bound


def _is_answered(path: str) -> bool:
    """Whether somebody listens on a socket file; one that is left over answers nothing."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
