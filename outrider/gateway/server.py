"""Process of the gateway: listen, follow a coordinator, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from outrider import __version__
from outrider.addresses import listening_error, listening_socket
from outrider.client import AsyncClient, Tls
from outrider.config import GatewaySettings
from outrider.gateway.app import make_app
from outrider.gateway.endpoints import Endpoints, GatewayLimits
from outrider.gateway.middleware import caller_key
from outrider.gateway.served_model import ModelWatch
from outrider.gateway.timed_protocol import TimedProtocol
from outrider.gateway.watching import HttpWatch
from outrider.process.tuning import freeze_objects
from outrider.process.watchdog import loop_watched
from outrider.readings import Reading
from outrider.telemetry.metrics.serving import build_info, metrics_served, read_on
from outrider.telemetry.tracing import traced
from outrider.tokenization.output_parsing import OutputFormat
from outrider.transport.ending import Ending
from outrider.transport.security import TokenFile

_log = logging.getLogger(__name__)
_BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""
_SEND_BUFFER_BYTES = 1 << 17
"""Send buffer of a connection in the kernel, which doubles it and would let it grow to some megabytes. A client that
does not read holds up its stream once this and its own buffer are full.
"""
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none is closed while a request is on its way."""


async def serve(settings: GatewaySettings) -> None:
    """Serve until a signal; raises the error that prevented the start."""
    ending = Ending(asyncio.get_running_loop())
    listener = _listen(settings)
    tokens = None if settings.api_token_file is None else TokenFile("api_token_file", settings.api_token_file)
    async with contextlib.AsyncExitStack() as running:
        watch, metrics = await _watch(settings, running)
        client = await running.enter_async_context(make_client(settings))
        endpoints = Endpoints(client, ModelWatch(client, names=_names(settings)), _limits(settings), _parsers(settings))
        app = make_app(endpoints, tokens=tokens, watch=watch, metrics=metrics, settings=settings)
        server = _Server(_config(settings, app))
        scheme = "http" if settings.tls_cert_file is None else "https"
        host, port = listener.getsockname()[:2]
        _log.info("listening on %s://%s:%s", scheme, host, port)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        freeze_objects()
        try:
            with loop_watched(settings.hang_timeout_s):
                await ending.begun.wait()
                await _drain(server, endpoints, ending, settings)
                await serving
        finally:
            ending.stop_listening()
    _log.info("stopped")


async def _watch(
    settings: GatewaySettings, running: contextlib.AsyncExitStack
) -> tuple[HttpWatch, Callable[[], list[Reading]]]:
    """Counter and tracer of requests, and the readings of the gateway."""
    tracing = await running.enter_async_context(traced(settings.name, trace_file=settings.trace_file))
    watch, build = HttpWatch(tracing), build_info(next(iter(_names(settings)), ""), __version__)

    def read() -> list[Reading]:
        return [*watch.readings(), build]

    running.enter_context(metrics_served(settings, read_on(asyncio.get_running_loop(), read)))
    return watch, read


def make_client(settings: GatewaySettings) -> AsyncClient:
    """The client of the configured coordinators."""
    tls = Tls(
        ca_file=settings.coordinator_tls_ca_file,
        cert_file=settings.coordinator_tls_cert_file,
        key_file=settings.coordinator_tls_key_file,
        server_name=settings.coordinator_tls_server_name,
    )
    token_file = settings.coordinator_token_file or settings.api_token_file
    own = None if token_file is None else TokenFile("coordinator_token_file", token_file).first
    return AsyncClient(
        settings.coordinator_address,
        tls=tls if tls != Tls() else settings.coordinator_tls,
        token=own or caller_key,
        # A caller's key that came here without TLS may go on without it.
        allow_plaintext_token=settings.allow_plaintext_token or (own is None and settings.tls_cert_file is None),
    )


class _Server(uvicorn.Server):
    """Server without signal handlers: the gateway's handlers drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No effect."""
        yield


async def _drain(server: _Server, endpoints: Endpoints, ending: Ending, settings: GatewaySettings) -> None:
    """Health says no; after a delay no connections are taken; running answers have the grace to finish."""
    _log.info("draining")
    endpoints.is_draining = True
    await ending.wait_hurried(settings.drain_delay_s)
    server.should_exit = True
    hurrying = asyncio.create_task(ending.hurried.wait())
    hurrying.add_done_callback(lambda task: None if task.cancelled() else setattr(server, "force_exit", True))


def bounded_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket whose connections have a bounded send buffer; ``OSError`` if there can be none."""
    listener = listening_socket(host, port, reuse_port=reuse_port, backlog=_BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted sockets inherit it
    return listener


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return bounded_socket(settings.host, settings.port, reuse_port=settings.reuse_port)
    except OSError as error:
        raise listening_error(
            settings.host, settings.port, error, port_setting="gateway.port", host_setting="gateway.host"
        ) from error


def _config(settings: GatewaySettings, app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_grace_s)),
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        ssl_ca_certs=settings.tls_client_ca_file,
        ssl_cert_reqs=2 if settings.tls_client_ca_file is not None else 0,
    )


def _limits(settings: GatewaySettings) -> GatewayLimits:
    return GatewayLimits(settings.max_body_bytes, settings.resume_timeout_s, settings.max_open_request_bytes)


def _parsers(settings: GatewaySettings) -> OutputFormat:
    return OutputFormat(settings.tool_call_parser, settings.reasoning_parser)


def _names(settings: GatewaySettings) -> tuple[str, ...]:
    named = (settings.served_model_name or "").split(",")
    return tuple(name.strip() for name in named if name.strip())
