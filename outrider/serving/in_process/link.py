"""Links of this process: commands into the engine thread, events out to the event loop that reads them.

Owns the hand-over between one event loop and the thread, its bounds, and what a reader and a sender see when a link
breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from outrider.errors import UnavailableError
from outrider.ports import EventBatch
from outrider.stalls import Stall

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

MAX_PENDING_COMMANDS = 100_000
"""Commands of one link that the thread has not taken yet; past it the link breaks. One outstanding command a session
never comes near."""
MAX_UNREAD_BATCHES = 10_000
"""Event batches that a link's reader has not taken yet; past it the link breaks."""


class CommandInbox(Protocol[CommandT, EventT]):
    """Inbox for the commands of all links, which the engine thread empties."""

    @property
    def num_pages_free(self) -> int:
        """Free KV pages of the core."""
        ...

    @property
    def stall(self) -> Stall:
        """Stall of the engine."""
        ...

    def submit(self, link: LocalLink[CommandT, EventT], commands: tuple[CommandT, ...]) -> bool:
        """Queue a message; False when the link has too many waiting."""
        ...

    def drop(self, link: LocalLink[CommandT, EventT], done: Callable[[], None]) -> None:
        """Release what the link holds, after all it sent; ``done`` is called when that has happened."""
        ...

    def note_read(self) -> None:
        """A reader has taken all that was delivered, and passed it on."""
        ...


class LocalLink(Generic[CommandT, EventT]):
    """``ports.Link`` to the engine thread of this process; made by its ``attach``, for one event loop."""

    def __init__(self, inbox: CommandInbox[CommandT, EventT], link_id: int, loop: asyncio.AbstractEventLoop) -> None:
        self.link_id = link_id
        self.num_sent = 0
        """Commands that were sent; changed by the event loop alone."""
        self.num_taken = 0
        """Commands that the thread has taken; changed by that alone."""
        self.is_read = False
        """True if its reader has passed on all that was delivered, and waits for more."""
        self._inbox = inbox
        self._loop = loop
        self._batches: deque[EventBatch[EventT]] = deque()
        self._changed = asyncio.Event()
        self._broken: str | None = None
        self._closed: asyncio.Future[None] | None = None

    @property
    def num_pending(self) -> int:
        """Commands that the thread has not taken yet."""
        return self.num_sent - self.num_taken

    @property
    def num_pages_free(self) -> int:
        """Free KV pages of the service now."""
        return self._inbox.num_pages_free

    @property
    def stall(self) -> Stall:
        """Stall of the service now."""
        return self._inbox.stall

    def send(self, commands: Sequence[CommandT]) -> None:
        """Queue one message and return at once; ``UnavailableError`` when the link is gone."""
        if self._closed is not None:
            raise UnavailableError("the link is closed")
        if self._broken is not None:
            raise UnavailableError(self._broken)
        if not self._inbox.submit(self, tuple(commands)):
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
            self.is_read = True
            self._inbox.note_read()
            await self._changed.wait()

    async def close(self) -> None:
        """Release the link's sessions; they are gone when this returns. Idempotent."""
        if self._closed is None:
            self._closed = self._loop.create_future()
            self._changed.set()
            self._inbox.drop(self, self._confirm_closed)
        await asyncio.shield(self._closed)

    def deliver(self, batch: EventBatch[EventT]) -> None:
        """Hand events to the reader. For the engine thread; ``RuntimeError`` when the loop is gone."""
        self.is_read = False
        self._loop.call_soon_threadsafe(self._append, batch)

    def break_off(self, reason: str) -> None:
        """Make the reader and later senders see ``UnavailableError``. From any thread; the sessions are released."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the reader with it
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
        self._inbox.drop(self, _do_nothing)

    def _confirm_closed(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_closed)

    def _set_closed(self) -> None:
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)


def _do_nothing() -> None:
    """Callback of a link whose release is not waited for."""
