"""Replicas of one service: discovered by name, each attached over one link.

Owns the set of replicas, which of them accept new sessions, and the session counts. A replica whose name disappeared
keeps its sessions while it answers. ``ReplicaEvents`` gets events and changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Generic, Protocol, runtime_checkable

from outrider.errors import OutriderError
from outrider.types import ModelDescription
from outrider_coordinator.routing.dispatch import CommandT, DispatchScheduler, EventT
from outrider_coordinator.routing.replica import CommandT_contra, EventT_co, Port, Replica, ReplicaEvents

_log = logging.getLogger(__name__)


_MUCH_FULLER, _FEW_SESSIONS = 1.25, 4
"""A replica with a quarter more sessions than another, and a few more, is much fuller."""
SOON_S = 1.0
"""Interval of name lookups until the first replica is found."""


@runtime_checkable
class Source(Protocol[CommandT_contra, EventT_co]):
    """Source of replicas."""

    @property
    def interval_s(self) -> float | None:
        """Interval of lookups in seconds; None: one lookup."""
        ...

    async def find(self) -> Mapping[str, Port[CommandT_contra, EventT_co]]:
        """The current replicas by name; a name always means the same replica."""
        ...


class Fixed(Generic[CommandT, EventT]):
    """A source with one replica."""

    interval_s: float | None = None

    def __init__(self, port: Port[CommandT, EventT]) -> None:
        self._port = port

    async def find(self) -> Mapping[str, Port[CommandT, EventT]]:
        """The port, under an empty name."""
        return {"": self._port}


class Replicas(Generic[CommandT, EventT]):
    """All replicas of one service, from ``start`` to ``close``."""

    def __init__(
        self,
        source: Source[CommandT, EventT],
        side: str,
        events: ReplicaEvents[CommandT, EventT],
        dispatch: DispatchScheduler,
    ) -> None:
        self._source, self._side, self._events, self._dispatch = source, side, events, dispatch
        self._replicas: dict[str, Replica[CommandT, EventT]] = {}
        self._num_hangs_of_gone = 0
        self._looked = asyncio.Event()
        self._look_now = asyncio.Event()
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()

    @property
    def is_up(self) -> bool:
        """True if any is attached."""
        return any(replica.is_up for replica in self._replicas.values())

    @property
    def attached(self) -> tuple[Replica[CommandT, EventT], ...]:
        """The attached replicas."""
        return tuple(replica for replica in self._replicas.values() if replica.is_up)

    @property
    def known(self) -> tuple[Replica[CommandT, EventT], ...]:
        """The replicas that are attached or may come back."""
        return tuple(self._replicas.values())

    @property
    def descriptions(self) -> tuple[ModelDescription, ...]:
        """Descriptions of the replicas that are attached, or were and may come back."""
        return tuple(found for replica in self._replicas.values() if (found := replica.description) is not None)

    @property
    def num_pages_free(self) -> int:
        """Free pages of all attached replicas, as last reported."""
        return sum(replica.num_pages_free for replica in self.attached)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV pages of all that are attached which sessions hold, as last reported; 0 without any page."""
        num_pages = sum(found.num_pages for replica in self.attached if (found := replica.description) is not None)
        return 1 - self.num_pages_free / num_pages if num_pages else 0.0

    @property
    def num_hangs(self) -> int:
        """Number of times that a replica was given up because it hung or did not answer, past replicas included."""
        return self._num_hangs_of_gone + sum(replica.num_hangs for replica in self._replicas.values())

    def start(self) -> None:
        """Discover and attach in the background."""
        self._task = asyncio.create_task(self._follow(), name=f"{self._side} replicas")

    async def first_try(self) -> None:
        """Return after the first attempt of all discovered replicas; raises errors that waiting does not resolve."""
        await self._looked.wait()
        tries = [replica.first_try() for replica in self._replicas.values()]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures and len(failures) == len(outcomes):
            raise failures[0]

    def choose(
        self,
        fits: Callable[[ModelDescription], bool] = lambda description: True,
        *,
        besides: Collection[Replica[CommandT, EventT]] = (),
        preferred: Iterable[Replica[CommandT, EventT]] = (),
    ) -> Replica[CommandT, EventT] | None:
        """The first of ``preferred`` that is not much fuller than the least loaded one, or that one; None when there is
        none that fits.

        One that is not found any more, or whose work makes no progress, takes sessions only while no other can: it may
        be about to go.
        """
        able = [
            replica
            for replica in self.attached
            if replica not in besides and replica.description is not None and fits(replica.description)
        ]
        least = min(able, key=attrgetter("load"), default=None)
        if least is None:
            return None
        most_sessions = _MUCH_FULLER * least.num_sessions + _FEW_SESSIONS
        sound = [each for each in preferred if each in able and each.is_listed and not each.is_stalled]
        good = (each for each in sound if each.num_sessions <= most_sessions)
        return next(good, least)

    def leave(self, replica: Replica[CommandT, EventT]) -> None:
        """A session has left the replica."""
        replica.num_sessions -= 1
        self._drop_if_done(replica)

    async def close(self) -> None:
        """Close every link, which releases its sessions, and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()), *self._closing_tasks)

    async def _follow(self) -> None:
        while True:
            self._look_now.clear()
            await self._look()
            if self._source.interval_s is None and self._replicas:
                return
            interval_s = self._source.interval_s or SOON_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s if self._replicas else min(interval_s, SOON_S)):
                    await self._look_now.wait()

    async def _look(self) -> None:
        try:
            found = await self._source.find()
        except OutriderError as error:
            self._note_trouble(str(error))  # those there are stay: they may well answer
        except Exception:
            _log.exception("looking for the %s failed", self._side)
        else:
            self._trouble = ""
            self._take(found)
        self._looked.set()

    def _take(self, found: Mapping[str, Port[CommandT, EventT]]) -> None:
        for name, port in found.items():
            if name not in self._replicas:
                self._add(name, port)
        for replica in tuple(self._replicas.values()):
            if replica.is_listed != (replica.name in found):
                replica.is_listed = replica.name in found
                _log.info("the %s at %s is %s", self._side, replica.name, "back" if replica.is_listed else "leaving")
            self._drop_if_done(replica)

    def _add(self, name: str, port: Port[CommandT, EventT]) -> None:
        label = f"{self._side} at {name}" if name else self._side
        replica = Replica(name, port, label, replace(self._events, lost=self._lost), self._dispatch)
        self._replicas[name] = replica
        replica.start()

    def _lost(self, replica: Replica[CommandT, EventT]) -> None:
        # A name may stand for another by now.
        self._look_now.set()
        self._drop_if_done(replica)
        self._events.lost(replica)

    def _drop_if_done(self, replica: Replica[CommandT, EventT]) -> None:
        """One that is not found any more goes when no session lives there, or when it does not answer either."""
        if replica.is_listed or (replica.num_sessions and replica.is_up):
            return
        if self._replicas.get(replica.name) is not replica:
            return  # gone already
        del self._replicas[replica.name]
        self._num_hangs_of_gone += replica.num_hangs
        _log.info("the %s at %s is detached", self._side, replica.name)
        closing = asyncio.create_task(replica.close())
        self._closing_tasks.add(closing)
        closing.add_done_callback(self._closing_tasks.discard)

    def _note_trouble(self, trouble: str) -> None:
        """Log a failure once, however often it repeats."""
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("the %s cannot be resolved: %s", self._side, trouble)
