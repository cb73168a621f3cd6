"""A gRPC server with all that every one of ours has: health, reflection, statuses for errors, a polite end.

Health is per service name and under "" for the whole; "liveness" says SERVING until the process itself has failed. It
follows nothing else, so that an orchestrator does not restart a process for what is wrong elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.addresses import check_listening, join_address
from outrider.errors import ConfigError
from outrider.open_requests import DEFAULT_MAX_BYTES
from outrider.ports import Draft, Target
from outrider.transport.channels import (
    FIXED_WINDOW,
    KEEPALIVE,
    MAX_COMMANDS_BYTES,
    MAX_LINK_MESSAGE_BYTES,
    MAX_PUBLIC_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    Options,
    message_limits,
)
from outrider.transport.http_health import HttpHealth, Probes
from outrider.transport.interceptor import MAX_CALLS, ErrorInterceptor
from outrider.transport.link.heartbeats import DEFAULT_COORDINATOR_TIMEOUT_S
from outrider.transport.security import OPEN_SERVER, ServerSecurity, ServerTls, TokenInterceptor
from outrider.transport.servicers import DraftServicer, GenerationServicer, Generator, TargetServicer
from outrider.v1 import generation_pb2, link_pb2
from outrider.v1.link_pb2_grpc import add_DraftServiceServicer_to_server, add_TargetServiceServicer_to_server

LIVENESS = "liveness"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for an answer that found its call ended: its caller's time was up, or it went away."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, grpc.aio.BaseError)


_GRPC_LOG.addFilter(_is_worth_a_line)

_OPTIONS: Options = [
    *KEEPALIVE,
    # Clients ping an idle link to see whether we are there; that is welcome.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Calls that have arrived and that the event loop has not taken in yet. By default gRPC cancels some from 1,000 on,
    # which their callers see as CANCELLED; here they wait, and those beyond the bounds on calls are RESOURCE_EXHAUSTED.
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    # Nor are they CANCELLED after gRPC's 30 s, on a machine so busy that the event loop takes longer.
    ("grpc.server_max_unrequested_time_in_server", 600),
]
_LINK_LIMITS = message_limits(MAX_LINK_MESSAGE_BYTES, max_received_bytes=MAX_COMMANDS_BYTES)


class Server:
    """One listening server. ``set_serving`` is called by the host of the service when it is ready."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: Any,  # noqa: ANN401
        service: str,
        address: str,
        http_health: HttpHealth,
    ) -> None:
        self._server = server
        self._http_health = http_health
        self._health = health_servicer
        self._service = service
        self._draining = False
        self.address = address
        """Address on which it listens, with the port that was chosen for port 0."""

    async def set_serving(self, serving: bool) -> None:
        """Health of the service and of the whole; never SERVING again once it drains."""
        status = SERVING if serving and not self._draining else NOT_SERVING
        for name in ("", self._service):
            await self._health.set(name, status)
        self._http_health.set_serving(status == SERVING)

    async def fail(self) -> None:
        """The process has failed, or hangs: health and liveness say NOT_SERVING from now on."""
        self._draining = True
        await self.set_serving(False)
        await self._health.set(LIVENESS, NOT_SERVING)
        self._http_health.fail()

    @property
    def health_port(self) -> int:
        """Port of health over HTTP; 0: none."""
        return self._http_health.port

    async def drain(self, *, delay_s: float, grace_s: float) -> None:
        """NOT_SERVING; after ``delay_s`` no new calls; running ones have ``grace_s`` to finish. Returns at the end."""
        self._draining = True
        await self.set_serving(False)
        await asyncio.sleep(delay_s)
        await self._server.stop(grace_s)
        self._http_health.close()

    async def stop(self) -> None:
        """End at once."""
        await self._server.stop(None)
        self._http_health.close()

    async def wait(self) -> None:
        """Wait until the server has ended."""
        await self._server.wait_for_termination()


async def serve_draft(
    draft: Draft,
    *,
    host: str,
    port: int,
    security: ServerSecurity = OPEN_SERVER,
    probes: Probes | None = None,
    link_timeout_s: float = DEFAULT_COORDINATOR_TIMEOUT_S,
) -> Server:
    """Listen for links to a draft; NOT_SERVING until ``set_serving``. ``ConfigError`` when the port is taken.

    ``link_timeout_s``: the silence after which a coordinator is gone and its sessions are released.
    """

    def add(server: grpc.aio.Server) -> None:
        add_DraftServiceServicer_to_server(DraftServicer(draft, link_timeout_s=link_timeout_s), server)

    name, limits = _service_name(link_pb2, "DraftService"), _LINK_LIMITS
    return await _serve(add, name, limits, host=host, port=port, security=security, probes=probes)


async def serve_target(
    target: Target,
    *,
    host: str,
    port: int,
    security: ServerSecurity = OPEN_SERVER,
    probes: Probes | None = None,
    link_timeout_s: float = DEFAULT_COORDINATOR_TIMEOUT_S,
    admit_channel: Callable[[socket.socket], None] | None = None,
) -> Server:
    """Listen for links to a target; NOT_SERVING until ``set_serving``. ``ConfigError`` when the port is taken.

    ``link_timeout_s``: the silence after which a coordinator is gone and its sessions are released.
    ``admit_channel``: serves the socket of a proposal channel from another host.
    """

    def add(server: grpc.aio.Server) -> None:
        servicer = TargetServicer(target, admit_channel=admit_channel, link_timeout_s=link_timeout_s)
        add_TargetServiceServicer_to_server(servicer, server)

    name, limits = _service_name(link_pb2, "TargetService"), _LINK_LIMITS
    return await _serve(add, name, limits, host=host, port=port, security=security, probes=probes)


async def serve_generation(
    generator: Generator,
    *,
    host: str,
    port: int,
    security: ServerSecurity = OPEN_SERVER,
    probes: Probes | None = None,
    max_connection_age_s: float | None = None,
    max_connection_age_grace_s: float | None = None,
    reuse_port: bool = False,
    own_port: int | None = None,
    max_open_request_bytes: int = DEFAULT_MAX_BYTES,
) -> Server:
    """Listen for users; NOT_SERVING until ``set_serving``. ``ConfigError`` when the port is taken.

    ``reuse_port``: other servers that say so may listen on the same port; the kernel spreads connections over them.
    ``own_port``: a further port, on which this one is reached and no other.
    ``max_open_request_bytes``: of requests that are being read and tokenized; more are RESOURCE_EXHAUSTED.

    A connection older than ``max_connection_age_s`` is asked to come again, so that users spread over new replicas
    behind a load balancer; what runs on it has ``max_connection_age_grace_s`` to finish, None: as long as it takes.
    """

    def add(server: grpc.aio.Server) -> None:
        servicer = GenerationServicer(generator, max_open_request_bytes=max_open_request_bytes, tokens=security.tokens)
        servicer.add_to(server)

    name = _service_name(generation_pb2, "GenerationService")
    options = [
        *FIXED_WINDOW,
        *message_limits(MAX_PUBLIC_MESSAGE_BYTES, max_received_bytes=MAX_REQUEST_BYTES),
        *_connection_age(max_connection_age_s, max_connection_age_grace_s),
    ]
    return await _serve(
        add,
        name,
        options,
        host=host,
        port=port,
        security=security,
        probes=probes,
        reuse_port=reuse_port,
        own_port=own_port,
    )


def _service_name(module: Any, name: str) -> str:  # noqa: ANN401 - generated modules have no type
    full: str = module.DESCRIPTOR.services_by_name[name].full_name
    return full


def _connection_age(max_s: float | None, grace_s: float | None) -> Options:
    named = (("grpc.max_connection_age_ms", max_s), ("grpc.max_connection_age_grace_ms", grace_s))
    return [(name, round(1000 * seconds)) for name, seconds in named if seconds is not None]


async def _serve(
    add: Callable[[grpc.aio.Server], None],
    service: str,
    options: Options,
    *,
    host: str,
    port: int,
    security: ServerSecurity,
    probes: Probes | None,
    reuse_port: bool = False,
    own_port: int | None = None,
) -> Server:
    security.check(host)
    # The first is the outermost: what the token check refuses becomes a status too.
    guards: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
    if security.tokens is not None:
        guards.append(TokenInterceptor(security.tokens))
    # Without this option a second server binds the same port without a word, and calls go to either.
    sharing = ("grpc.so_reuseport", int(reuse_port))
    server = grpc.aio.server(
        interceptors=guards, options=[*_OPTIONS, sharing, *options], maximum_concurrent_rpcs=MAX_CALLS
    )
    add(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((service, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    bound = _bind(server, host, port, security.tls)
    if own_port is not None:
        _bind(server, host, own_port, security.tls, setting="own_port")
    await health_servicer.set(LIVENESS, SERVING)
    http_health = HttpHealth()
    if probes is not None:
        await http_health.start(probes.host, probes.port)
    listening = Server(server, health_servicer, service, join_address(host, bound), http_health)
    await listening.set_serving(False)
    await server.start()
    return listening


def _bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None, *, setting: str = "port") -> int:
    credentials = None if tls is None else tls.credentials()
    address = join_address(host, port)
    # gRPC replaces a socket file on which another process listens, without an error.
    if host.startswith("unix:") and _is_answered(host.removeprefix("unix:")):
        raise ConfigError("host", f"{host} is in use")
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _unbound(host, port, setting) from error
    if bound == 0:
        raise _unbound(host, port, setting)
    return bound


def _unbound(host: str, port: int, setting: str) -> ConfigError:
    """Error that names why gRPC could not listen, which it does not say."""
    try:
        check_listening(host, port, port_setting=setting, host_setting="host")
    except ConfigError as error:
        return error
    return ConfigError("host" if host.startswith("unix:") else setting, f"cannot listen on {join_address(host, port)}")


def _is_answered(path: str) -> bool:
    """True if a process listens on a socket file; a leftover file answers nothing."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
