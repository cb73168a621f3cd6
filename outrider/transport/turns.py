"""Turns: how many calls have their messages read at the same time, and in which order.

gRPC takes the first 64 KiB of a call and no more until its message is asked for; then it holds whatever has come of it.
The messages of hundreds of calls that are all asked for at once would be held together before any of them is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from outrider.transport.link.counts import host_of

LAST_CHANCE_S = 0.02
"""Time between the end of a turn's time and its end: an event loop that was held up reads first what has come
meanwhile.
"""

_SHARE_OF_SILENT = 4
"""One turn of this number is a silent connection's while others wait."""
_MOST_SILENT = 4096
"""Connections that are remembered as silent, the newest."""

Waiter = asyncio.Future[None]


class Turns:
    """Turns of calls whose messages are read. Belongs to one event loop.

    Hosts that wait are served in rotation, and so are the connections of each: a host with hundreds of calls holds up
    the others, and its own other connections, for one turn.
    """

    def __init__(self, most: int, *, busy_s: float, longest_s: float, demotes_silent: bool = False) -> None:
        """``most`` turns at a time. One lasts ``busy_s``, and while no call waits up to ``longest_s``: calls that send
        nothing would hold up all others. ``demotes_silent``: connections whose last turn was over before their message
        came wait behind the others, so that hundreds of silent ones hold up a newcomer once.
        """
        self._num_free, self._busy_s, self._longest_s = most, busy_s, longest_s
        self._demotes_silent = demotes_silent
        self._waiting = _Waiting()
        self._waiting_silent = _Waiting()
        """Calls of connections in ``_silent``."""
        self._silent: dict[str, None] = {}
        """Connections whose last turn was over before their message came, oldest first."""
        self._num_given = 0
        """Turns that were given to calls that had waited."""
        self._long: dict[_Turn, None] = {}
        """Turns that last until another call waits, oldest first."""

    @contextlib.asynccontextmanager
    async def taken(self, peer: str) -> AsyncIterator[None]:
        """A turn of a call of ``peer``, as gRPC names it. ``TimeoutError`` when it is over before the context ends."""
        await self._begin(peer)
        try:
            async with asyncio.timeout(None) as limit:
                turn = _Turn(limit)
                is_busy = bool(self._waiting or self._waiting_silent)
                turn.end_after(self._busy_s if is_busy else self._longest_s)
                if not is_busy:
                    self._long[turn] = None
                try:
                    yield
                finally:
                    turn.stop()
                    self._long.pop(turn, None)
        except TimeoutError:
            if self._demotes_silent:
                self._note_silent(peer)
            raise
        else:
            self._silent.pop(peer, None)
        finally:
            self._end()

    def _note_silent(self, peer: str) -> None:
        self._silent[peer] = None
        if len(self._silent) > _MOST_SILENT:
            del self._silent[next(iter(self._silent))]

    async def _begin(self, peer: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        waiting = self._waiting_silent if peer in self._silent else self._waiting
        waiting.put(peer, waiter)
        if self._long:
            oldest = next(iter(self._long))
            del self._long[oldest]
            oldest.end_after(self._busy_s)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                waiting.remove(peer, waiter)
            else:  # it got its turn and was cancelled at the same time
                self._end()
            raise

    def _end(self) -> None:
        while self._waiting or self._waiting_silent:
            waiter = self._next_waiting().pop()
            if not waiter.done():  # one that was cancelled has not left yet
                waiter.set_result(None)
                return
        self._num_free += 1

    def _next_waiting(self) -> _Waiting:
        if not (self._waiting and self._waiting_silent):
            return self._waiting or self._waiting_silent
        self._num_given += 1
        return self._waiting if self._num_given % _SHARE_OF_SILENT else self._waiting_silent


class _Turn:
    """The time of a turn."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit, self._loop = limit, asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def end_after(self, seconds: float) -> None:
        """End so long after its begin."""
        self.stop()
        self._timer = self._loop.call_at(self._began + seconds, self._leave_last_chance)

    def stop(self) -> None:
        """Do not end by itself any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _leave_last_chance(self) -> None:
        if not self._limit.expired():
            self._limit.reschedule(self._loop.time() + LAST_CHANCE_S)


class _Waiting:
    """Calls that wait, by host and connection."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[str, dict[Waiter, None]]] = {}
        """Each in the order in which they come next."""

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def put(self, peer: str, waiter: Waiter) -> None:
        self._hosts.setdefault(host_of(peer), {}).setdefault(peer, {})[waiter] = None

    def remove(self, peer: str, waiter: Waiter) -> None:
        """Forget one that waits no more, if it is still here."""
        connections = self._hosts.get(host_of(peer), {})
        waiters = connections.get(peer, {})
        if waiter not in waiters:
            return
        del waiters[waiter]
        if not waiters:
            del connections[peer]
        if not connections:
            del self._hosts[host_of(peer)]

    def pop(self) -> Waiter:
        """The next one; its host and its connection go to the end."""
        host = next(iter(self._hosts))
        connections = self._hosts.pop(host)
        peer = next(iter(connections))
        waiters = connections.pop(peer)
        waiter = next(iter(waiters))
        del waiters[waiter]
        if waiters:
            connections[peer] = waiters
        if connections:
            self._hosts[host] = connections
        return waiter
