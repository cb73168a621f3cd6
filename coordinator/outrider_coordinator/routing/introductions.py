"""Introductions of targets to drafts, so that these may talk to each other directly.

Owns one connection for each attached pair that may have one: the target is asked for an offer, the offer is brought to
the draft, and it is tried again when the connection has ended. What the two do with it is a subclass's.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from outrider.types import ModelDescription
from outrider_coordinator.routing.replica import Replica

RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Waits before a pair is introduced again: the first, and the longest after repeated failures."""

AnyReplica = Replica[Any, Any]
StateT = TypeVar("StateT")


@dataclass(slots=True, eq=False)
class Introduction(Generic[StateT]):
    """One target, one draft, and the connection between them."""

    target: AnyReplica
    draft: AnyReplica
    state: StateT
    """State of the connection."""
    connection: int = 0
    """Connection number on both links; 0 while there is none."""
    retry_s: float = RETRY_S
    retry: asyncio.TimerHandle | None = None


class Introductions(abc.ABC, Generic[StateT]):
    """All pairs of one coordinator."""

    ending: ClassVar[type[Any]]
    """Command that ends a connection."""

    def __init__(self, nothing_yet: StateT) -> None:
        """``nothing_yet``: the state of a pair before anything was received about it."""
        self._nothing_yet = nothing_yet
        self._numbers = itertools.count(1)
        self._pairs: dict[tuple[AnyReplica, AnyReplica], Introduction[StateT]] = {}

    def introduce(self, target: AnyReplica, draft: AnyReplica) -> None:
        """Ask a target for an offer to a draft, if the two may meet. Both are attached."""
        ours, theirs = target.description, draft.description
        if ours is None or theirs is None or not self._may_meet(ours, theirs):
            return
        new: Introduction[StateT] = Introduction(target, draft, self._nothing_yet)
        found = self._pairs.setdefault((target, draft), new)
        found.retry, found.connection = None, next(self._numbers)
        target.send_alone(self._request(found.connection))

    def lost(self, replica: AnyReplica) -> None:
        """A replica's link has ended, and its ends of all connections with it; the other ends are told."""
        for pair in [pair for pair in self._pairs if replica in pair]:
            self._drop(self._pairs.pop(pair))

    def close(self) -> None:
        """Stop introducing services to each other."""
        for found in self._pairs.values():
            if found.retry is not None:
                found.retry.cancel()
        self._pairs.clear()

    @abc.abstractmethod
    def _may_meet(self, target: ModelDescription, draft: ModelDescription) -> bool:
        """True if the two are to be introduced."""

    @abc.abstractmethod
    def _request(self, connection: int) -> Any:  # noqa: ANN401 - a command
        """Asks a target for an offer."""

    def _found(self, target: AnyReplica | None, draft: AnyReplica | None) -> Introduction[StateT] | None:
        return None if target is None or draft is None else self._pairs.get((target, draft))

    def _introduction(self, replica: AnyReplica, connection: int) -> Introduction[StateT] | None:
        """The pair that a replica's event is about; None for one that has been forgotten since."""
        found = next((each for each in self._pairs.values() if connection == each.connection), None)
        return found if found is not None and connection and replica in (found.target, found.draft) else None

    def _try_again(self, found: Introduction[StateT]) -> None:
        """The connection has ended, or could not be made."""
        self._drop(found)
        again = asyncio.get_running_loop().call_later(found.retry_s, self.introduce, found.target, found.draft)
        found.retry, found.retry_s = again, min(2 * found.retry_s, LONGEST_RETRY_S)

    def _drop(self, found: Introduction[StateT]) -> None:
        """Let go of the connection on both sides; on a link that is lost that goes nowhere."""
        if found.retry is not None:
            found.retry.cancel()
        if found.connection:
            command = self.ending(found.connection)
            found.connection = 0
            found.target.send_alone(command)
            found.draft.send_alone(command)


def name_of(replica: AnyReplica) -> str:
    """Name of a pair in logs."""
    return replica.name or "this process"
