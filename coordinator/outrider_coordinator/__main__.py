"""``outrider coordinator``: serve users over gRPC, with targets and optional drafts at given addresses.

Owns the start of a coordinator's process, its health, and its end. Health is SERVING while a target is attached; drafts
do not affect it.
"""

from __future__ import annotations

import os

from outrider.process.tuning import grpc_environment

os.environ.update(grpc_environment())  # before gRPC is imported

if __name__ == "__main__":
    from outrider.process.extras import exit_without_extras

    exit_without_extras(["coordinator"], "the coordinator service")

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from outrider.config import CoordinatorSettings
from outrider.process.cpu_affinity.keeper import pinned_to_cpus
from outrider.process.discovery import RemoteReplicas
from outrider.process.hosting import run_process
from outrider.process.model_files import with_local_tokenizer
from outrider.process.tuning import freeze_objects
from outrider.process.watchdog import loop_watched
from outrider.telemetry.metrics.serving import metrics_served, read_on
from outrider.telemetry.stats_logger import coordinator_fields, log_stats
from outrider.telemetry.tracing import Tracing, traced
from outrider.transport.ending import Ending
from outrider.transport.http_health import Probes
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.security import link_security, public_security
from outrider.transport.server import Server, serve_generation
from outrider_coordinator.service import Coordinator

_log = logging.getLogger(__name__)


async def serve(settings: CoordinatorSettings) -> None:
    """Serve until a signal; raises the error that prevented the start."""
    settings = with_local_tokenizer(settings)
    ending = Ending(asyncio.get_running_loop())
    target_up = asyncio.Queue[bool]()
    async with traced(settings.name, trace_file=settings.trace_file) as tracing:
        coordinator = _coordinator(settings, target_up.put_nowait, tracing)
        with metrics_served(settings, read_on(asyncio.get_running_loop(), coordinator.readings)):
            await _serve(settings, coordinator, ending, target_up)
    _log.info("stopped")


async def _serve(
    settings: CoordinatorSettings, coordinator: Coordinator, ending: Ending, target_up: asyncio.Queue[bool]
) -> None:
    server = await serve_generation(
        coordinator,
        host=settings.host,
        port=settings.port,
        security=public_security(settings),
        probes=Probes.of(settings),
        max_connection_age_s=settings.max_connection_age_s,
        max_connection_age_grace_s=settings.max_connection_age_grace_s,
        reuse_port=settings.reuse_port,
        own_port=settings.own_port,
        max_open_request_bytes=settings.max_open_request_bytes,
    )
    _log.info("listening on %s", server.address)
    following = asyncio.create_task(_follow_target(server, target_up))
    stats_task = asyncio.create_task(log_stats(settings.log_interval_s, coordinator.readings, coordinator_fields))
    try:
        if await _unless(ending.begun, coordinator.start()):
            freeze_objects()
            with loop_watched(settings.hang_timeout_s):
                async with pinned_to_cpus(settings.num_pinned_cpus, lambda: coordinator.num_running > 0):
                    await ending.begun.wait()
                    _log.info("draining")
                    # A second signal ends the requests at once that still run.
                    draining = server.drain(delay_s=settings.drain_delay_s, grace_s=settings.drain_grace_s)
                    await _unless(ending.hurried, draining)
    finally:
        following.cancel()
        stats_task.cancel()
        await coordinator.close()
        await server.stop()


def _coordinator(
    settings: CoordinatorSettings, on_target: Callable[[bool], None], tracing: Tracing | None
) -> Coordinator:
    """Coordinator with the targets and where there are any the drafts at the addresses of the settings."""
    security, timeout_s = link_security(settings), settings.link_timeout_ms / 1000
    to_target = partial(RemoteTarget, connect_timeout_s=timeout_s, link_timeout_s=timeout_s)
    to_draft = partial(RemoteDraft, connect_timeout_s=timeout_s, link_timeout_s=timeout_s)
    replicas = partial(RemoteReplicas, security=security, interval_s=settings.resolve_interval_s)
    targets = replicas(settings.target_address, to_target, setting="target_address")
    draft_address = settings.draft_address
    drafts = None if draft_address is None else replicas(draft_address, to_draft, setting="draft_address")
    return Coordinator(targets, drafts, settings, on_target=on_target, tracing=tracing)


async def _follow_target(server: Server, target_up: asyncio.Queue[bool]) -> None:
    """Health says whether a target is attached, in the order in which it came and went."""
    while True:
        await server.set_serving(await target_up.get())


async def _unless(signal: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """True if the work has ended, whose error is raised; False when the signal came first, which cancels it."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(signal.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
        return working.done()
    finally:
        for task in (working, stopping):
            task.cancel()


if __name__ == "__main__":
    run_process(CoordinatorSettings, serve)
