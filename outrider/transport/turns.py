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
"""Between the end of a turn's time and its end: an event loop that was held up reads first what has come meanwhile."""

Waiter = asyncio.Future[None]


class Turns:
    """Turns of calls whose messages are read. Belongs to one event loop.

    Hosts that wait are served in rotation, and so are the connections of each: a host with hundreds of calls holds up
    the others, and its own other connections, for one turn.
    """

    def __init__(self, most: int, *, busy_s: float, longest_s: float) -> None:
        """``most`` turns at a time. One lasts ``busy_s``, and while no call waits up to ``longest_s``: calls that send
        nothing would hold up all others.
        """
        self._num_free, self._busy_s, self._longest_s = most, busy_s, longest_s
        self._waiting = _Waiting()
        self._long: dict[_Turn, None] = {}
        """Turns that last until another call waits, oldest first."""

    @contextlib.asynccontextmanager
    async def taken(self, peer: str) -> AsyncIterator[None]:
        """A turn of a call of ``peer``, as gRPC names it. ``TimeoutError`` when it is over before the context ends."""
        await self._begin(peer)
        try:
            async with asyncio.timeout(None) as limit:
                turn = _Turn(limit)
                turn.end_after(self._busy_s if self._waiting else self._longest_s)
                if not self._waiting:
                    self._long[turn] = None
                try:
                    yield
                finally:
                    turn.stop()
                    self._long.pop(turn, None)
        finally:
            self._end()

    async def _begin(self, peer: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.put(peer, waiter)
        if self._long:
            oldest = next(iter(self._long))
            del self._long[oldest]
            oldest.end_after(self._busy_s)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiting.remove(peer, waiter)
            else:  # it got its turn and was cancelled at the same time
                self._end()
            raise

    def _end(self) -> None:
        while self._waiting:
            waiter = self._waiting.pop()
            if not waiter.done():  # one that was cancelled has not left yet
                waiter.set_result(None)
                return
        self._num_free += 1


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
