"""The life of a process that serves one draft or target: listen, load, warm up, serve, drain, end.

The port is bound before anything is loaded, so that one in use is told at once; health says SERVING only after the
warm-up. Loading runs in a thread, so health answers meanwhile. Knows no model: it is given what loads one. What every
process of ours begins with, the coordinator's too, is ``run_process``.

SIGTERM and SIGINT drain: NOT_SERVING, a delay for load balancers, then no new sessions, and the end when those that
are open have ended or the grace is over. An engine that fails ends the process with an error, and so does one that
hangs, by the watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from outrider.config import CoordinatorSettings, DraftSettings, GatewaySettings, TargetSettings, load_named
from outrider.errors import LoadingError, RequestCancelledError, UnavailableError
from outrider.ports import Link
from outrider.process.cpu_affinity.keeper import pinned_to_cpus
from outrider.process.loading import LoadingWatch, LoadProgress
from outrider.process.tuning import freeze_objects
from outrider.process.watchdog import LoopPing, Watchdog
from outrider.readings import Reading
from outrider.recording import Recorder
from outrider.stalls import Stall
from outrider.telemetry import exit_cleanly, guard_output, set_up_logging
from outrider.telemetry.metrics.serving import build_info, metrics_served
from outrider.telemetry.progress import ByteProgress, CountProgress
from outrider.telemetry.stats_logger import log_stats, service_fields
from outrider.telemetry.tracing import traced
from outrider.telemetry.tracing.service_spans import ServiceRecorder
from outrider.transport.ending import Ending
from outrider.transport.server import Server
from outrider.types import ModelDescription

_log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.05
"""Interval at which a draining process checks that no request is left."""

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)

SettingsT = TypeVar("SettingsT", TargetSettings, DraftSettings, CoordinatorSettings, GatewaySettings)

OnFailure = Callable[[BaseException], None]


class Service(Protocol[CommandT_contra, EventT_co]):
    """Draft or target service of this process."""

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        ...

    @property
    def stall(self) -> Stall:
        """Age of the work that makes no progress; thread-safe."""
        ...

    async def describe(self) -> ModelDescription:
        """Return the description of the service."""
        ...

    async def attach(self) -> Link[CommandT_contra, EventT_co]:
        """Open a link."""
        ...

    async def warm_up(self) -> None:
        """Run a first forward in advance."""
        ...

    def readings(self) -> list[Reading]:
        """Current readings; thread-safe."""
        ...

    def record_to(self, recorder: Recorder) -> None:
        """Record traced items; called before any link is opened."""
        ...

    def refuse_sessions(self) -> None:
        """Refuse new sessions from now on."""
        ...

    def admit_channel(self, connected: socket.socket) -> None:
        """Serve a connection for a proposal channel; returns at once."""
        ...

    async def close(self) -> None:
        """Close the service and its links."""
        ...


class PendingService(Generic[CommandT, EventT]):
    """Port of a service that may still be loading."""

    def __init__(self) -> None:
        self.loaded: Service[CommandT, EventT] | None = None
        self._about: list[Reading] = []

    def readings(self) -> list[Reading]:
        """Current readings; thread-safe."""
        return self._about if self.loaded is None else [*self._about, *self.loaded.readings()]

    def note_warm(self, description: ModelDescription, load_seconds: float) -> None:
        """Record that the service is ready, and the seconds since loading began."""
        self._about = [
            build_info(description.model_name, description.version),
            Reading("outrider_model_load_seconds", load_seconds),
        ]

    async def describe(self) -> ModelDescription:
        """Return the description; ``LoadingError`` while the service loads."""
        return await self._require_loaded().describe()

    async def attach(self) -> Link[CommandT, EventT]:
        """Open a link; ``LoadingError`` while the service loads."""
        return await self._require_loaded().attach()

    def admit_channel(self, connected: socket.socket) -> None:
        """Serve a connection for a proposal channel; ``LoadingError`` while the service loads."""
        self._require_loaded().admit_channel(connected)

    def _require_loaded(self) -> Service[CommandT, EventT]:
        if self.loaded is None:
            raise LoadingError("the model is still being loaded")
        return self.loaded


def run_process(
    section: type[SettingsT],
    serve: Callable[[SettingsT], Coroutine[Any, Any, None]],
    follow: Callable[[SettingsT], bool] | None = None,
) -> None:
    """Read the settings of a section and serve with them, unless ``follow`` does something else; an ``OutriderError``
    becomes one line and exit code 1.
    """
    guard_output()
    with exit_cleanly():
        settings, names = load_named(section)
        set_up_logging(settings.log_level, service=section.name)
        with names.in_errors():
            if follow is None or not follow(settings):
                run(serve(settings))


async def host_service(
    serve: Callable[[PendingService[CommandT, EventT]], Awaitable[Server]],
    load_model: Callable[[LoadProgress, OnFailure], Service[CommandT, EventT]],
    settings: TargetSettings | DraftSettings,
) -> None:
    """Serve until a signal or a failure; raises the error that prevented the start or ended the service.

    ``serve`` binds the port; ``load_model`` runs in a thread and reports its progress.
    """
    ending = Ending(asyncio.get_running_loop())
    pending: PendingService[CommandT, EventT] = PendingService()
    loading = LoadingWatch(asyncio.get_running_loop(), settings.hang_timeout_s)
    server = await serve(pending)
    _log.info("listening on %s", server.address)
    try:
        async with traced(settings.name, trace_file=settings.trace_file) as tracing:
            with metrics_served(settings, pending.readings):
                began = time.perf_counter()
                loading.start()
                service = await _load(load_model, settings.name, ending, loading)
                if service is not None:
                    if tracing is not None:
                        service.record_to(ServiceRecorder(tracing, settings.name))
                    pending.loaded = service

                    def on_warm(description: ModelDescription) -> None:
                        loading.stop()
                        pending.note_warm(description, time.perf_counter() - began)

                    await _run(server, service, ending, settings, on_warm=on_warm)
    finally:
        loading.stop()
        await server.stop()
        ending.stop_listening()
    _log.info("stopped")


def run(main: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` with uvloop if it is installed, which halves the time of a round trip."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _load(
    load_model: Callable[[LoadProgress, OnFailure], Service[CommandT, EventT]],
    name: str,
    ending: Ending,
    loading: LoadingWatch,
) -> Service[CommandT, EventT] | None:
    """The service, or None when a signal came first."""
    weights, captures = ByteProgress(f"loading the {name}"), CountProgress(f"capturing the {name}'s CUDA graphs")
    progress = LoadProgress(
        weights=loading.watched(ending.watched(weights)),
        captures=loading.watched(ending.watched(captures)),
        on_files=loading.note,
    )
    try:
        service = await asyncio.to_thread(load_model, progress, ending.fail)
        loading.note()
        return service
    except RequestCancelledError:
        return None
    finally:
        weights.stop()
        captures.stop()


async def _run(
    server: Server,
    service: Service[CommandT, EventT],
    ending: Ending,
    settings: TargetSettings | DraftSettings,
    *,
    on_warm: Callable[[ModelDescription], None],
) -> None:
    stats_task = asyncio.create_task(log_stats(settings.log_interval_s, service.readings, service_fields))
    watchdog = _watchdog(service, ending, settings.hang_timeout_s)
    try:
        if not ending.begun.is_set():
            await service.warm_up()
            freeze_objects()
            description = await service.describe()
            on_warm(description)
            watchdog.start()
            async with pinned_to_cpus(
                _num_pinned_cpus(settings.num_pinned_cpus, description), lambda: service.num_sessions > 0
            ):
                await server.set_serving(True)
                _log.info("serving")
                await ending.begun.wait()
                await (server.set_serving(False) if ending.failure is None else server.fail())
                await _drain(service, ending, delay_s=settings.drain_delay_s, grace_s=settings.drain_grace_s)
        ending.raise_failure()
    finally:
        stats_task.cancel()
        await service.close()
        watchdog.stop()


def _watchdog(service: Service[CommandT, EventT], ending: Ending, timeout_s: float) -> Watchdog:
    """Watchdog that runs until the engine has ended: its last step may hang too."""
    return Watchdog(
        {"the engine": lambda: service.stall, "the event loop": LoopPing(asyncio.get_running_loop(), timeout_s).look},
        timeout_s=timeout_s,
        on_hang=lambda reason: ending.fail(UnavailableError(reason)),
    )


def _num_pinned_cpus(count: int | None, description: ModelDescription) -> int | None:
    """CPUs to pin: none without a GPU, where they compute the model, unless the setting is given."""
    return 0 if count is None and not description.device.startswith("cuda") else count


async def _drain(service: Service[CommandT, EventT], ending: Ending, *, delay_s: float, grace_s: float) -> None:
    await ending.wait_hurried(delay_s)
    service.refuse_sessions()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while service.num_sessions and not ending.hurried.is_set():
                await ending.wait_hurried(_IDLE_POLL_S)
