"""Engine thread: the only thread in which a service computes, and the owner of its device.

Runs a synchronous engine core, and breaks all links when it stops.

The thread passes all messages that have arrived to the core, lets it take one step, delivers the events, and waits at
its inbox if there is nothing to do, or if the core asks for a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from outrider.batched import ScoreAhead, ScoreBatch, num_items, one_by_one
from outrider.errors import UnavailableError
from outrider.ports import EventBatch
from outrider.proposal_channel.pushes import ChainStart, Pushes
from outrider.proposal_channel.verdicts import Verdicts
from outrider.recording import Recorder
from outrider.serving.in_process.channel_host import CHANNEL_COMMANDS, ChannelHost, NoChannels
from outrider.serving.in_process.inbox import Inbox
from outrider.serving.in_process.link import MAX_PENDING_COMMANDS, LocalLink
from outrider.serving.in_process.plane_host import PLANE_COMMANDS, NoPlanes, PlaneHost
from outrider.stalls import NO_STALL, Stall, StallClock
from outrider.timer_slack import reduce_timer_slack

_log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)

MAX_COMMANDS_OF_TURN = 4096
"""Commands of one link that are handled between two steps: four for each of the sessions that it has by default. The
others wait for the next turn, so that one link's flood delays the forwards of others by some 15 ms."""

LONGEST_DELIVERY_S = 1e-3
"""Longest wait of the thread for the event loop to send answers, before it goes on with what no answer waits for. A
thread that computes keeps the interpreter lock for up to 5 ms, and answers would leave when all that is done."""

_FORWARD_MARGIN = 5.0
"""A forward is not hung before it has taken this many times as long as it may, as far as is known."""

_OF_NO_CORE = PLANE_COMMANDS | CHANNEL_COMMANDS

OnFailure = Callable[[BaseException], None]


class Core(Protocol[CommandT_contra, EventT]):
    """The computation of a service, step by step; called by one thread."""

    recorder: Recorder | None
    """Recorder of traced items."""

    @property
    def has_work(self) -> bool:
        """True if ``step`` has anything to do."""
        ...

    @property
    def pause_s(self) -> float:
        """Recommended pause before the next step unless a message arrives, in seconds; usually 0."""
        ...

    def handle(self, link_id: int, commands: Sequence[CommandT_contra], *, arrived_ns: int | None = None) -> None:
        """Process one message of a link; computes nothing."""
        ...

    def expect(self, link_id: int, batched: ScoreBatch) -> None:
        """Prepare for a message that brings the draft tokens of these arrays; computes nothing, answers nothing."""
        ...

    def begin(self, link_id: int, said: Verdicts | ChainStart | Pushes, *, is_idle: bool = True) -> None:
        """Prepare for what will be asked for after what came by a channel; computes nothing, answers nothing.
        ``is_idle``: nothing else has arrived.
        """
        ...

    send_verdicts: Any
    """Called with messages before the core begins a step by itself; returns them."""

    def drop_link(self, link_id: int) -> None:
        """Release all sessions of the link."""
        ...

    @property
    def next_check_s(self) -> float | None:
        """Seconds until ``end_idle_sessions`` is due; None without sessions."""
        ...

    def end_idle_sessions(self) -> None:
        """End the sessions that have received nothing for the timeout."""
        ...

    def refuse_sessions(self, reason: str) -> None:
        """Refuse new sessions from now on."""
        ...

    @property
    def progress(self) -> tuple[bool, int]:
        """Progress: True while a forward is in flight, and a number that rises; read from any thread."""
        ...

    @property
    def longest_forward_s(self) -> float:
        """The longest that the oldest forward in flight may take, as far as is known; read from any thread."""
        ...

    @property
    def num_sessions(self) -> int:
        """Number of open sessions; read from any thread."""
        ...

    @property
    def num_pages_free(self) -> int:
        """Number of free KV pages; read from any thread."""
        ...

    def step(self) -> list[tuple[int, EventBatch[EventT]]]:
        """Step of at most one forward; the answers by link. It raises for a bug or a dead device, never for one
        session.
        """
        ...

    def post_step(self) -> None:
        """Do what no answer waits for; called when the messages of a step have left."""
        ...


@dataclass(slots=True)  # frozen, it would take twice as long to make
class _Message(Generic[CommandT, EventT]):
    link: LocalLink[CommandT, EventT]
    commands: tuple[CommandT, ...]
    num_items: int
    """Commands, those of arrays counted one by one."""
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _Drop(Generic[CommandT, EventT]):
    link: LocalLink[CommandT, EventT]
    done: Callable[[], None]


_Entry: TypeAlias = _Message[Any, Any] | _Drop[Any, Any]


class EngineThread(Generic[CommandT, EventT]):
    """Runs a core in its own thread. ``on_failure`` is called in that thread, once, if the core raises."""

    def __init__(
        self,
        core: Core[CommandT, EventT],
        *,
        name: str = "engine",
        on_failure: OnFailure | None = None,
        planes: PlaneHost | None = None,
        channels: ChannelHost | None = None,
        hang_timeout_s: float = 0.0,
    ) -> None:
        """``planes`` serves the commands of the tensor plane, ``channels`` those of proposal channels; None: there are
        none. ``hang_timeout_s``: time without progress after which the engine counts as hung; 0: never.
        """
        self._core = core
        core.send_verdicts = self._send_verdicts
        self._planes: PlaneHost = planes or NoPlanes()
        self._channels: ChannelHost = channels or NoChannels()
        self._on_failure = on_failure
        self._inbox: Inbox[_Entry | None] = Inbox()
        """None: something else has changed that the thread may wait for."""
        self._arrived: list[_Entry] = []
        """Taken out of the inbox by the thread, for later turns."""
        self._taken: deque[_Entry] = deque()
        """Entries that this turn has not handled yet; the first is being handled."""
        self._lock = threading.Lock()
        """Lock of the open links and of the thread's end."""
        self._links: dict[int, LocalLink[CommandT, EventT]] = {}
        self._next_link_id = 0
        self._stopping = False
        self._gone: str | None = None
        self._hang_timeout_s = hang_timeout_s
        self._stall_clock = StallClock()
        self._is_in_turn = False
        self._num_turns = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while commands reach the core."""
        return self._gone is None

    @property
    def num_pages_free(self) -> int:
        """Free KV pages of the core."""
        return self._core.num_pages_free

    @property
    def stall(self) -> Stall:
        """Age of the work that makes no progress; for any thread.

        It is that of the device's work, not of the thread: the thread polls on while a device hangs.
        """
        if not self._hang_timeout_s or self._gone is not None:
            return NO_STALL
        limit_s = max(self._hang_timeout_s, _FORWARD_MARGIN * self._core.longest_forward_s)
        return Stall(self._stall_clock.look(self._mark()), limit_s)

    def _mark(self) -> Hashable | None:
        """A value that changes with progress; None: there is no work."""
        is_computing, count = self._core.progress
        if is_computing or self._core.has_work:
            return is_computing, count
        return None if self._inbox.is_empty and not self._is_in_turn else self._num_turns

    def require_progress(self) -> None:
        """``UnavailableError`` if the thread has stopped, or hangs."""
        self._require_alive()
        if self.stall.is_hang:
            raise UnavailableError("the engine hangs: it makes no progress, and there is work")

    @property
    def links(self) -> list[LocalLink[CommandT, EventT]]:
        """Open links."""
        return list(self._links.values())

    def attach(self) -> LocalLink[CommandT, EventT]:
        """Open a link for the running event loop; ``UnavailableError`` if the thread has stopped, or hangs."""
        self.require_progress()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._require_alive()
            link = LocalLink(self, self._next_link_id, loop)
            self._next_link_id += 1
            self._links[link.link_id] = link
        return link

    def submit(self, link: LocalLink[CommandT, EventT], commands: tuple[CommandT, ...]) -> bool:
        """Queue a message; False if too many wait on this link. Used by links."""
        self._require_alive()
        count = num_items(commands)
        if link.num_pending + count > MAX_PENDING_COMMANDS:
            return False
        link.num_sent += count
        self._inbox.put(_Message(link, commands, count, time.perf_counter_ns()))
        return True

    def drop(self, link: LocalLink[CommandT, EventT], done: Callable[[], None]) -> None:
        """Release the link's sessions after all its messages; ``done`` is called then. Used by links."""
        with self._lock:
            if self._gone is None:
                self._inbox.put(_Drop(link, done))
                return
        done()

    def close(self) -> None:
        """Stop after the current step and wait for the thread; links break. Idempotent."""
        self._stopping = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_alive(self) -> None:
        if self._gone is not None:
            raise UnavailableError(self._gone)

    def _run(self) -> None:
        reduce_timer_slack()
        try:
            while self._take():
                self._is_in_turn = True
                self._turn()
                self._is_in_turn = False
                self._num_turns += 1
            for link_id in list(self._links):
                self._core.drop_link(link_id)
        except BaseException as error:
            _log.exception("the engine failed; every link to it breaks")
            self._stop(f"the engine failed: {type(error).__name__}: {error}")
            if self._on_failure is not None:
                self._on_failure(error)
        else:
            self._stop("the engine was shut down")

    def _take(self) -> bool:
        """Take what has arrived, of each link as much as one turn handles, without waiting while there is work; False
        when it is time to stop.
        """
        while not (self._has_arrived() or self._stopping or self._is_due() or self._is_check_due()):
            self._inbox.wait(self._core.pause_s if self._core.has_work else self._core.next_check_s)
        if self._stopping:
            return False
        taken, self._arrived = _of_one_turn(self._arrived)
        for entry in taken:
            if isinstance(entry, _Message):
                entry.link.num_taken += entry.num_items
        self._taken.extend(taken)
        return True

    def _has_arrived(self) -> bool:
        """True if there are messages, which are then all taken out of the inbox."""
        self._arrived += [entry for entry in self._inbox.take_all() if entry is not None]
        return bool(self._arrived)

    def _turn(self) -> None:
        while self._taken:
            entry = self._taken[0]
            if isinstance(entry, _Drop):
                self._remove_link(entry.link.link_id)
                entry.done()
            elif entry.link.link_id in self._links:
                self._handle(entry)
            self._taken.popleft()
        if self._is_check_due():
            self._core.end_idle_sessions()
        if self._is_due():
            messages = self._core.step()
            if messages:
                self._send(messages)
            self._core.post_step()

    def _send(self, messages: Sequence[tuple[int, EventBatch[EventT]]]) -> None:
        """Deliver answers, and let the event loop send them unless there is something else to do. Links whose readers
        are behind are not waited for.
        """
        links = [link for link_id, _ in messages if (link := self._links.get(link_id)) is not None and link.is_read]
        for link_id, batch in messages:
            self._deliver(link_id, batch)
        until = time.perf_counter() + LONGEST_DELIVERY_S
        while not (self._has_arrived() or self._stopping or all(link.is_read for link in links)):
            left = until - time.perf_counter()
            if left <= 0:
                break
            self._inbox.wait(left)

    def _send_verdicts(self, messages: Any) -> Any:  # noqa: ANN401 - by link
        return [
            (link_id, self._channels.send(link_id, batch) if batch.batched else batch) for link_id, batch in messages
        ]

    def note_read(self) -> None:
        """A reader of answers has caught up. Used by links."""
        self._inbox.put(None)

    def _handle(self, message: _Message[CommandT, EventT]) -> None:
        link, commands = message.link, message.commands
        if isinstance(commands[0], Verdicts | ChainStart | Pushes):
            is_idle = len(self._taken) == 1 and not self._has_arrived()
            self._core.begin(link.link_id, commands[0], is_idle=is_idle)
            return
        if _OF_NO_CORE.isdisjoint(map(type, commands)):
            self._core.handle(link.link_id, commands, arrived_ns=message.arrived_ns)
            return
        beside = [command for command in commands if type(command) in _OF_NO_CORE]
        for command in beside:
            self._handle_without_core(link, command)
        if len(beside) < len(commands):
            commands = tuple(command for command in commands if type(command) not in _OF_NO_CORE)
            self._core.handle(link.link_id, commands, arrived_ns=message.arrived_ns)
        for command in beside:
            if isinstance(command, ScoreAhead) and not self._has_arrived():  # else there is no time left for it
                self._core.expect(link.link_id, command.batched)

    def _handle_without_core(self, link: LocalLink[CommandT, EventT], command: Any) -> None:  # noqa: ANN401 - of a plane or channel
        def tell(event: Any) -> None:  # noqa: ANN401 - of no session, so none of EventT
            with contextlib.suppress(RuntimeError):  # its loop is closed
                link.deliver(EventBatch((event,)))

        def submit(batched: Any) -> None:  # noqa: ANN401 - a command
            # Not counted among what the link has sent: it was asked for by a command that was.
            self._inbox.put(_Message(link, (batched,), 0, time.perf_counter_ns()))

        if type(command) in CHANNEL_COMMANDS:
            self._channels.handle(link.link_id, command, tell, submit)
        else:
            self._planes.handle(link.link_id, command, tell)

    def _is_due(self) -> bool:
        return self._core.has_work and not self._core.pause_s

    def _is_check_due(self) -> bool:
        return self._core.next_check_s == 0.0

    def _deliver(self, link_id: int, batch: EventBatch[EventT]) -> None:
        link = self._links.get(link_id)
        if link is None:
            return
        if batch.batched:
            batch = self._channels.send(link_id, batch)
            if not batch.batched and not batch.events:  # pushes alone
                return
        try:
            link.deliver(batch)
        except RuntimeError:  # its loop was closed without closing the link
            self._remove_link(link_id)

    def _remove_link(self, link_id: int) -> None:
        with self._lock:
            known = self._links.pop(link_id, None)
        if known is not None:
            self._core.drop_link(link_id)
            self._planes.drop_link(link_id)
            self._channels.drop_link(link_id)

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._gone = reason
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.break_off(reason)
        self._has_arrived()
        for entry in (*self._taken, *self._arrived):
            if isinstance(entry, _Drop):
                entry.done()


def _of_one_turn(inbox: list[_Entry]) -> tuple[list[_Entry], list[_Entry]]:
    """The entries of one turn, and those that are left for later ones; each link's stay in order. A message may be cut:
    its parts mean the same one after the other.
    """
    if sum([entry.num_items for entry in inbox if isinstance(entry, _Message)]) <= MAX_COMMANDS_OF_TURN:
        return inbox, []
    taken: list[_Entry] = []
    left: list[_Entry] = []
    room: dict[int, int] = {}
    for entry in inbox:
        link_id = entry.link.link_id
        most = room.get(link_id, MAX_COMMANDS_OF_TURN)
        if not most:
            left.append(entry)
        elif isinstance(entry, _Message) and entry.num_items > most:
            room[link_id] = 0
            commands = one_by_one(entry.commands)
            taken.append(replace(entry, commands=tuple(commands[:most]), num_items=most))
            left.append(replace(entry, commands=tuple(commands[most:]), num_items=len(commands) - most))
        else:
            taken.append(entry)
            room[link_id] = most - (entry.num_items if isinstance(entry, _Message) else 0)
    return taken, left
