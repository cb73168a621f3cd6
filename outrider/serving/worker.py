"""The thread that owns a device, and the links through which event loops reach it.

Owns the one thread in which a service computes, the hand-over of commands and events between it and any number of
asyncio loops, and what becomes of the links when it stops. Refuses to know what a command means: that is the
``Core``'s, which is synchronous and needs no thread. Imports no torch.

The thread takes everything that has arrived on all links, hands it to the core, lets it take one step, delivers the
events, and waits on a condition when there is nothing to do, or when the core says that what there is can wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.errors import UnavailableError
from outrider.ports import EventBatch
from outrider.recording import Recorder
from outrider.serving.timer_slack import be_punctual

_log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)

MAX_PENDING_COMMANDS = 100_000
"""Commands of one link that the thread has not taken yet; past it the link breaks. One outstanding command a session
never comes near."""
MAX_UNREAD_BATCHES = 10_000
"""Event batches that a link's reader has not taken yet; past it the link breaks."""

OnFailure = Callable[[BaseException], None]


class Core(Protocol[CommandT_contra, EventT]):
    """What a service computes, step by step; called by one thread alone."""

    recorder: Recorder | None
    """Told of traced items."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        ...

    @property
    def pause_s(self) -> float:
        """For how long there had better be no step unless something arrives, in seconds; usually 0."""
        ...

    def handle(self, link_id: int, commands: Sequence[CommandT_contra], *, arrived_ns: int | None = None) -> None:
        """Take in one message of a link; computes nothing."""
        ...

    def drop_link(self, link_id: int) -> None:
        """Release everything that the link holds."""
        ...

    @property
    def next_check_s(self) -> float | None:
        """Seconds until ``end_idle_sessions`` is due; None while there are no sessions."""
        ...

    def end_idle_sessions(self) -> None:
        """End the sessions for which nothing has come for too long."""
        ...

    def refuse_sessions(self, reason: str) -> None:
        """Refuse new sessions from now on."""
        ...

    @property
    def num_sessions(self) -> int:
        """Sessions that are open; read from any thread."""
        ...

    def step(self) -> list[tuple[int, EventBatch[EventT]]]:
        """At most one forward; the answers by link. It raises for a bug or a dead device, never for one session."""
        ...


@dataclass(frozen=True, slots=True)
class _Message(Generic[CommandT, EventT]):
    link: LocalLink[CommandT, EventT]
    commands: tuple[CommandT, ...]
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _Drop(Generic[CommandT, EventT]):
    link: LocalLink[CommandT, EventT]
    done: Callable[[], None]


class LocalLink(Generic[CommandT, EventT]):
    """``ports.Link`` to a worker in this process; made by ``EngineWorker.attach``, used on the loop it was made on."""

    def __init__(self, worker: EngineWorker[CommandT, EventT], link_id: int, loop: asyncio.AbstractEventLoop) -> None:
        self.link_id = link_id
        self.num_pending = 0
        """Commands that the thread has not taken yet; guarded by the worker's lock."""
        self._worker = worker
        self._loop = loop
        self._batches: deque[EventBatch[EventT]] = deque()
        self._changed = asyncio.Event()
        self._broken: str | None = None
        self._closed: asyncio.Future[None] | None = None

    def send(self, commands: Sequence[CommandT]) -> None:
        """Queue one message and return at once; ``UnavailableError`` when the link is gone."""
        if self._closed is not None:
            raise UnavailableError("the link is closed")
        if self._broken is not None:
            raise UnavailableError(self._broken)
        if not self._worker.submit(self, tuple(commands)):
            self.break_off(f"more than {MAX_PENDING_COMMANDS} commands are waiting")
            raise UnavailableError(self._broken)

    async def events(self) -> AsyncIterator[EventBatch[EventT]]:
        """The answers, to one reader; ends after ``close``, raises ``UnavailableError`` when the link breaks."""
        while True:
            while self._batches:
                yield self._batches.popleft()
            if self._closed is not None:
                return
            if self._broken is not None:
                raise UnavailableError(self._broken)
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Release the link's sessions; they are gone when this returns. Idempotent."""
        if self._closed is None:
            self._closed = self._loop.create_future()
            self._changed.set()
            self._worker.drop(self, self._confirm_closed)
        await asyncio.shield(self._closed)

    def deliver(self, batch: EventBatch[EventT]) -> None:
        """Hand events to the reader. For the worker, from any thread; ``RuntimeError`` when the loop is gone."""
        self._loop.call_soon_threadsafe(self._append, batch)

    def break_off(self, reason: str) -> None:
        """Make the reader and later senders see ``UnavailableError``. From any thread; the sessions are released."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._break, reason)
        self._broken = self._broken or reason

    def _append(self, batch: EventBatch[EventT]) -> None:
        if self._closed is not None:
            return
        self._batches.append(batch)
        self._changed.set()
        if len(self._batches) > MAX_UNREAD_BATCHES:
            self._batches.clear()
            self.break_off(f"its reader left {MAX_UNREAD_BATCHES} messages unread")

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._changed.set()
        self._worker.drop(self, _do_nothing)

    def _confirm_closed(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_closed)

    def _set_closed(self) -> None:
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)


class EngineWorker(Generic[CommandT, EventT]):
    """Runs a core in a thread of its own. ``on_failure`` is called in that thread, once, if the core ever raises."""

    def __init__(
        self, core: Core[CommandT, EventT], *, name: str = "engine", on_failure: OnFailure | None = None
    ) -> None:
        self._core = core
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._inbox: list[_Message[CommandT, EventT] | _Drop[CommandT, EventT]] = []
        self._links: dict[int, LocalLink[CommandT, EventT]] = {}
        self._next_link_id = 0
        self._stopping = False
        self._gone: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether commands still reach the core."""
        return self._gone is None

    def attach(self) -> LocalLink[CommandT, EventT]:
        """A new link for the running event loop; ``UnavailableError`` when the worker has stopped."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._require_alive()
            link = LocalLink(self, self._next_link_id, loop)
            self._next_link_id += 1
            self._links[link.link_id] = link
        return link

    def submit(self, link: LocalLink[CommandT, EventT], commands: tuple[CommandT, ...]) -> bool:
        """Queue a message; False when the link has too many waiting. For links."""
        message = _Message(link, commands, time.perf_counter_ns())
        with self._changed:
            self._require_alive()
            if link.num_pending + len(commands) > MAX_PENDING_COMMANDS:
                return False
            link.num_pending += len(commands)
            self._inbox.append(message)
            self._changed.notify()
        return True

    def drop(self, link: LocalLink[CommandT, EventT], done: Callable[[], None]) -> None:
        """Release what the link holds, after all it sent; ``done`` is called when that has happened. For links."""
        with self._changed:
            if self._gone is None:
                self._inbox.append(_Drop(link, done))
                self._changed.notify()
                return
        done()

    def close(self) -> None:
        """Stop after the step in progress and wait for the thread; links break. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_alive(self) -> None:
        if self._gone is not None:
            raise UnavailableError(self._gone)

    def _run(self) -> None:
        be_punctual()
        try:
            while (inbox := self._take()) is not None:
                self._turn(inbox)
        except BaseException as error:
            _log.exception("the engine failed; every link to it breaks")
            self._stop(f"the engine failed: {type(error).__name__}: {error}")
            if self._on_failure is not None:
                self._on_failure(error)
        else:
            for link_id in list(self._links):
                self._core.drop_link(link_id)
            self._stop("the engine was shut down")

    def _take(self) -> list[_Message[CommandT, EventT] | _Drop[CommandT, EventT]] | None:
        """Everything that has arrived, without waiting while there is work; None when it is time to stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._is_due() or self._is_check_due()):
                self._changed.wait(self._core.pause_s if self._core.has_work else self._core.next_check_s)
            if self._stopping:
                return None
            inbox, self._inbox = self._inbox, []
            for entry in inbox:
                if isinstance(entry, _Message):
                    entry.link.num_pending -= len(entry.commands)
            return inbox

    def _turn(self, inbox: Sequence[_Message[CommandT, EventT] | _Drop[CommandT, EventT]]) -> None:
        for entry in inbox:
            if isinstance(entry, _Drop):
                self._forget(entry.link.link_id)
                entry.done()
            elif entry.link.link_id in self._links:
                self._core.handle(entry.link.link_id, entry.commands, arrived_ns=entry.arrived_ns)
        if self._is_check_due():
            self._core.end_idle_sessions()
        if self._is_due():
            for link_id, batch in self._core.step():
                self._deliver(link_id, batch)

    def _is_due(self) -> bool:
        return self._core.has_work and not self._core.pause_s

    def _is_check_due(self) -> bool:
        return self._core.next_check_s == 0.0

    def _deliver(self, link_id: int, batch: EventBatch[EventT]) -> None:
        link = self._links.get(link_id)
        if link is None:
            return
        try:
            link.deliver(batch)
        except RuntimeError:  # its loop was closed without closing the link
            self._forget(link_id)

    def _forget(self, link_id: int) -> None:
        with self._changed:
            known = self._links.pop(link_id, None)
        if known is not None:
            self._core.drop_link(link_id)

    def _stop(self, reason: str) -> None:
        with self._changed:
            self._gone = reason
            inbox, self._inbox = self._inbox, []
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.break_off(reason)
        for entry in inbox:
            if isinstance(entry, _Drop):
                entry.done()


def _do_nothing() -> None:
    """Nobody waits for this link's release."""
