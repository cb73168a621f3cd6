"""Replica: one draft or target, the link to it, and how many sessions live there; and where replicas are found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, runtime_checkable

from outrider.ports import EventBatch, PeerEvent
from outrider.types import ModelDescription
from outrider_coordinator.routing.dispatch import CommandT, DispatchScheduler, EventT
from outrider_coordinator.routing.replica_connection import CommandT_contra, EventT_co, Port, ReplicaConnection


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


class Replica(ReplicaConnection[CommandT, EventT]):
    """One draft or target, with its link."""

    def __init__(
        self,
        name: str,
        port: Port[CommandT, EventT],
        label: str,
        events: ReplicaEvents[CommandT, EventT],
        dispatch: DispatchScheduler,
    ) -> None:
        self.name = name
        self.is_listed = True
        """True if it was found when last looked for."""
        self.num_sessions = 0
        """Sessions that live there."""
        super().__init__(
            port,
            label,
            dispatch=dispatch,
            accept=events.accept,
            on_attached=lambda: events.attached(self),
            on_batch=partial(events.on_batch, self),
            on_lost=lambda: events.lost(self),
            on_peer_event=partial(events.on_peer_event, self),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def load(self) -> tuple[bool, bool, int, int]:
        """Sort key, least for the best one for a session: it is listed, its work progresses, then sessions of this
        coordinator, then KV pages in use by all coordinators.
        """
        return not self.is_listed, self.is_stalled, self.num_sessions, -self.num_pages_free
