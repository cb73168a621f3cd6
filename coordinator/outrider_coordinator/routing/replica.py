"""Replica: one draft or target, the link to it, reader and outbox, and reconnection; how many sessions live there.

Sends all commands of a turn as one message. ``ReplicaEvents`` gets the events, and the changes of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from outrider.batched import CommandBatch, ScoreAhead
from outrider.errors import (
    ConfigError,
    DeadlineError,
    LoadingError,
    OutriderError,
    PairMismatchError,
    UnavailableError,
)
from outrider.ports import (
    EventBatch,
    Link,
    Opened,
    PeerCommand,
    PeerEvent,
)
from outrider.types import ModelDescription
from outrider_coordinator.routing.answer_watch import LOOK_INTERVAL_S, AnswerWatch
from outrider_coordinator.routing.dispatch import CommandT, DispatchScheduler, EventT

_log = logging.getLogger(__name__)

CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)

RETRY_S = 0.1
"""Wait between two attempts to reach a service: it may be back at any moment, and trying costs little."""
LONGEST_RETRY_S = 2.0
"""Wait between two attempts that a service refuses, for a wrong token say: retries rarely help and are not cheap."""
FIRST_ABSENCE_S, LONGEST_ABSENCE_S = 30.0, 600.0
"""Pauses for a service that answered nothing since it was last given up: the first and the longest; each doubles."""

_FATAL = (ConfigError, PairMismatchError)
"""Errors that persist however long one waits."""
_UNREACHABLE = (UnavailableError, DeadlineError)


class Port(Protocol[CommandT_contra, EventT_co]):
    """``ports.Draft`` or ``ports.Target``."""

    async def describe(self) -> ModelDescription:
        """Return the description of the service."""
        ...

    async def attach(self) -> Link[CommandT_contra, EventT_co]:
        """Open a link."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaEvents(Generic[CommandT, EventT]):
    """Receivers of the events and changes of a service's replicas."""

    accept: Callable[[ModelDescription], Awaitable[None]]
    """Called before a replica is attached; raises the reason against it."""
    attached: Callable[[Replica[CommandT, EventT]], None]
    """The replica is attached, for the first time or again."""
    lost: Callable[[Replica[CommandT, EventT]], None]
    """The link has ended, and with it its sessions."""
    on_batch: Callable[[Replica[CommandT, EventT], EventBatch[EventT]], None]
    on_peer_event: Callable[[Replica[CommandT, EventT], PeerEvent], None]
    """An event of a connection between the replica and a peer."""


class Replica(Generic[CommandT, EventT]):
    """One draft or target, kept attached from ``start`` to ``close``."""

    def __init__(
        self,
        name: str,
        port: Port[CommandT, EventT],
        label: str,
        events: ReplicaEvents[CommandT, EventT],
        dispatch: DispatchScheduler,
    ) -> None:
        """``label``: what logs call it."""
        self.name = name
        self.is_listed = True
        """True if it was found when last looked for."""
        self.num_sessions = 0
        """Sessions that live there."""
        self.description: ModelDescription | None = None
        """Description of the service that is attached, or was last."""
        self.num_hangs = 0
        """Number of times that the service was given up because it made no progress, or did not answer."""
        self._num_unanswered = 0
        """Number of such times since its last answer."""
        self._port, self._label, self._events = port, label, events
        self._link: Link[CommandT, EventT] | None = None
        self._outbox: list[Any] = []
        """Commands, and arrays of them."""
        self._dispatch = dispatch
        self._link_queue = dispatch.link_queue(self._flush)
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._tried = asyncio.get_running_loop().create_future()
        # An error that is not awaited would be logged.
        self._tried.add_done_callback(lambda tried: tried.cancelled() or tried.exception())

    def __str__(self) -> str:
        return self.name

    @property
    def load(self) -> tuple[bool, bool, int, int]:
        """Sort key, least for the best one for a session: it is listed, its work progresses, then sessions of this
        coordinator, then KV pages in use by all coordinators.
        """
        return not self.is_listed, self.is_stalled, self.num_sessions, -self.num_pages_free

    @property
    def is_up(self) -> bool:
        """True if commands reach the service."""
        return self._link is not None

    @property
    def num_pages_free(self) -> int:
        """Number of free pages as last reported, at most the number of pages; all of them until then."""
        if self._link is None or self.description is None:
            return 0
        reported, num_pages = self._link.num_pages_free, self.description.num_pages
        return num_pages if reported is None else min(reported, num_pages)

    @property
    def is_stalled(self) -> bool:
        """True if the service has made no progress with its work lately."""
        return self._link is not None and self._link.stall.is_suspicious

    def start(self) -> None:
        """Attach in the background, and reconnect after losses."""
        self._task = asyncio.create_task(self._keep_attached(), name=f"{self._label} link")

    async def first_try(self) -> None:
        """Return after the first attempt; raises errors that waiting does not resolve."""
        await asyncio.shield(self._tried)

    def send(self, command: CommandT) -> None:
        """Queue commands for this link's next message; dropped if the link is lost, with its sessions."""
        if self._link is not None:
            self._outbox.append(command)
            self._link_queue.put(command)

    def send_batch(self, batched: CommandBatch) -> None:
        """Send commands of many sessions: all of plain steps, or all of steps with drafts."""
        if self._link is not None:
            self._outbox.append(batched)
            self._link_queue.put_batch(batched)

    @property
    def num_steps_open(self) -> int:
        """Steps of sessions that wait to be sent, or for their answers."""
        return self._link_queue.num_open

    def note_direct(self, batched: CommandBatch) -> None:
        """The service was asked for these by somebody else, and is at it."""
        if self._link is not None:
            self._link_queue.note_direct(batched)

    def send_alone(self, command: PeerCommand | ScoreAhead) -> None:
        """Send what takes no turn in a message of its own, now; dropped if the link is lost."""
        if self._link is None:
            return
        link: Any = self._link  # of no session, so none of CommandT
        with contextlib.suppress(UnavailableError):
            link.send([command])

    def end_link(self) -> None:
        """Break the link, after which all is sent again."""
        if self._link is not None:
            self._closing = asyncio.ensure_future(_close(self._link))

    async def close(self) -> None:
        """Close the link, which releases its sessions, and stop."""
        self._flush()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._tell_first_try(None)
        link, self._link = self._link, None
        if link is not None:
            await _close(link)
        if self._closing is not None:
            await self._closing
        self._link_queue.close()

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        self._link_queue.note_sent(commands)
        if self._link is None or not commands:
            return
        # A broken link is noticed by its reader, which tells the sessions.
        try:
            self._link.send(commands)
        except UnavailableError:
            pass
        except Exception:
            # A lost command would never be answered.
            _log.exception("commands to the %s could not be sent", self._label)
            self.end_link()

    async def _keep_attached(self) -> None:
        wait_s = RETRY_S
        while True:
            try:
                link = await self._attach()
                wait_s = RETRY_S
                await self._read_while_answered(link)
            except OutriderError as error:
                self._log_trouble(error)
                self._tell_first_try(error)
                wait_s = RETRY_S if isinstance(error, _UNREACHABLE) else min(2 * wait_s, LONGEST_RETRY_S)
                self.num_hangs += self._link is not None and self._link.stall.is_hang
            except Exception:
                _log.exception("the %s link failed", self._label)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
            await self._lose_link()
            await asyncio.sleep(max(wait_s, self.absence_s))

    def _log_trouble(self, error: OutriderError) -> None:
        """Log a failure once, however often it repeats."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            level = logging.INFO if isinstance(error, LoadingError) else logging.WARNING
            _log.log(level, "the %s is not attached: %s", self._label, error)

    async def _attach(self) -> Link[CommandT, EventT]:
        description = await self._port.describe()
        await self._events.accept(description)
        link = await self._port.attach()
        self.description = description
        self._link = link
        self._link_queue.device_id = description.device_id
        self._outbox = []
        _log.info("the %s is attached: %s", self._label, description.model_name)
        self._trouble = ""
        self._events.attached(self)
        self._tell_first_try(None)
        return link

    @property
    def absence_s(self) -> float:
        """Pause before the service is connected again; there is none the first times, which may have been chance."""
        doublings = self._num_unanswered - 2
        return 0.0 if doublings < 0 else min(FIRST_ABSENCE_S * 2.0**doublings, LONGEST_ABSENCE_S)

    async def _read_while_answered(self, link: Link[CommandT, EventT]) -> None:
        """Read until the link ends; ``UnavailableError`` too when an item is not answered."""
        reading, watch = asyncio.ensure_future(self._read(link)), AnswerWatch()
        try:
            while not (await asyncio.wait([reading], timeout=LOOK_INTERVAL_S))[0]:
                overdue_s = watch.overdue_s(self._link_queue, link.stall.limit_s)
                if overdue_s is not None:
                    self._num_unanswered += 1
                    self.num_hangs += 1
                    raise UnavailableError(f"an item was not answered for {overdue_s:.0f} s")
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, link: Link[CommandT, EventT]) -> None:
        async for batch in link.events():
            if batch.events and isinstance(batch.events[0], PeerEvent):
                self._events.on_peer_event(self, batch.events[0])
                continue
            self._dispatch.begin_message()
            try:
                self._link_queue.note_answers(batch.events, batch.batched)
                if batch.batched or not all(isinstance(event, Opened) for event in batch.events):
                    self._num_unanswered = 0
                self._events.on_batch(self, batch)
            finally:
                self._dispatch.end_message()
            await asyncio.sleep(0)  # the commands are written before the next message is asked for
        raise UnavailableError("the link ended")

    async def _lose_link(self) -> None:
        link, self._link, self._outbox = self._link, None, []
        self._link_queue.clear()
        if link is not None:
            # Goes on to its end even when this task is cancelled by what follows from the loss.
            self._closing = asyncio.ensure_future(_close(link))
            self._events.lost(self)
            await asyncio.shield(self._closing)

    def _tell_first_try(self, error: OutriderError | None) -> None:
        if self._tried.done():
            return
        if isinstance(error, _FATAL):
            self._tried.set_exception(error)
        else:
            self._tried.set_result(None)


async def _close(link: Link[CommandT, EventT]) -> None:
    with contextlib.suppress(OutriderError):
        await link.close()
