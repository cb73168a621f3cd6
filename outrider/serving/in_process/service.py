"""In-process service: a description, an engine core in its thread, and links to it.

What ``ports.Draft`` and ``ports.Target`` have in common when the service runs in this process. Does not know which of
the two it is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from outrider.errors import UnavailableError
from outrider.kv_cache import PrefixCache
from outrider.ports import Opened, Refused, SessionFailed, SessionLost
from outrider.readings import Reading
from outrider.recording import Recorder
from outrider.serving.in_process.channel_host import ChannelHost, NoChannels
from outrider.serving.in_process.engine_thread import Core, EngineThread, OnFailure
from outrider.serving.in_process.link import LocalLink
from outrider.serving.in_process.plane_host import NoPlanes, PlaneHost
from outrider.serving.stats import ServiceStats
from outrider.stalls import Stall
from outrider.types import ModelDescription

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)


class CountedCore(Core[CommandT_contra, EventT], Protocol[CommandT_contra, EventT]):
    """A core that says what it has done."""

    @property
    def stats(self) -> ServiceStats:
        """Statistics so far; may be read from any thread."""
        ...


class InProcessService(Generic[CommandT, EventT]):
    """A draft or target that computes in a thread of this process.

    ``warm_up`` sends ``warm_up_commands``, which are what a first request would send. ``on_failure`` is called from the
    engine thread if its core ever raises; every link is broken by then. ``on_closed`` is called once nothing computes
    any more.
    """

    def __init__(
        self,
        core: CountedCore[CommandT, EventT],
        description: ModelDescription,
        *,
        warm_up_commands: Sequence[CommandT] = (),
        capture_seconds: float = 0.0,
        on_failure: OnFailure | None = None,
        on_closed: Callable[[], None] | None = None,
        prefix_cache: PrefixCache | None = None,
        planes: PlaneHost | None = None,
        channels: ChannelHost | None = None,
        hang_timeout_s: float = 0.0,
    ) -> None:
        self._on_closed = on_closed
        self.planes: PlaneHost = planes or NoPlanes()
        self.channels: ChannelHost = channels or NoChannels()
        self.description = description
        self.core = core
        self._warm_up_commands = tuple(warm_up_commands)
        self._capture_seconds = capture_seconds
        self._prefix_cache = prefix_cache
        self.thread = EngineThread(
            core,
            name=f"{description.role}-engine",
            on_failure=on_failure,
            planes=planes,
            channels=channels,
            hang_timeout_s=hang_timeout_s,
        )
        """Thread that owns the device."""

    @property
    def is_alive(self) -> bool:
        """True if links can be opened; False after a failure and after ``close``."""
        return self.thread.is_alive

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return self.core.num_sessions

    @property
    def stall(self) -> Stall:
        """Age of the work that makes no progress; from any thread."""
        return self.thread.stall

    @property
    def stats(self) -> ServiceStats:
        """Statistics so far, without the warm-up."""
        return self.core.stats

    def readings(self) -> list[Reading]:
        """Figures of this moment; from any thread."""
        free, num_pages = self.core.num_pages_free, self.description.num_pages
        return [
            *self.core.stats.readings(),
            Reading("outrider_sessions_open", self.core.num_sessions),
            Reading("outrider_stall_seconds", self.thread.stall.age_s),
            Reading("outrider_kv_pages_free", free),
            Reading("outrider_kv_pages_used", num_pages - free),
            Reading("outrider_kv_cache_usage_perc", 1 - free / num_pages if num_pages else 0.0),
            Reading("outrider_graph_capture_seconds", self._capture_seconds),
            *self._prefix_cache_readings(),
            *self.planes.readings(),
            *self.channels.readings(),
        ]

    def _prefix_cache_readings(self) -> list[Reading]:
        cache = self._prefix_cache
        return [
            Reading("outrider_prefix_cache_queries_total", cache.num_queried_tokens if cache else 0),
            Reading("outrider_prefix_cache_hits_total", cache.num_hit_tokens if cache else 0),
            Reading("outrider_prefix_cache_evictions_total", cache.num_evicted_pages if cache else 0),
        ]

    def refuse_sessions(self) -> None:
        """Refuse new sessions from now on, because the service is about to end."""
        self.core.refuse_sessions("the service is ending")

    def admit_channel(self, connected: socket.socket) -> None:
        """``ChannelHost.admit``."""
        self.channels.admit(connected)

    def record_to(self, recorder: Recorder) -> None:
        """Have traced items noted; before any link is opened."""
        self.core.recorder = recorder

    async def describe(self) -> ModelDescription:
        """Facts of the service; ``UnavailableError`` when it has stopped, or hangs."""
        self.thread.require_progress()
        return self.description

    async def attach(self) -> LocalLink[CommandT, EventT]:
        """Open a link; ``UnavailableError`` when the service has stopped, or hangs."""
        return self.thread.attach()

    async def warm_up(self) -> None:
        """Serve the warm-up commands in the engine thread, as requests will be; ``UnavailableError`` if that fails."""
        if not self._warm_up_commands:
            return
        link = await self.attach()
        try:
            link.send(self._warm_up_commands)
            async for batch in link.events():
                for event in batch.events:
                    if isinstance(event, SessionLost | SessionFailed | Refused):
                        why = event.message if isinstance(event, SessionFailed) else event.reason
                        raise UnavailableError(f"the warm-up request could not be served: {why}")
                if not all(isinstance(event, Opened) for event in batch.events):
                    return
        finally:
            await link.close()
            self.core.stats.clear()
            if self._prefix_cache is not None:
                self._prefix_cache.clear_counts()

    async def close(self) -> None:
        """Stop after the step in progress; links break. Idempotent."""
        await asyncio.to_thread(self.thread.close)
        await asyncio.to_thread(self.planes.close)
        await asyncio.to_thread(self.channels.close)
        if self._on_closed is not None:
            await asyncio.to_thread(self._on_closed)
