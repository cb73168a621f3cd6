"""Introductions of targets to drafts that read their hidden states, so that the states need not pass through here.

Owns one connection for each attached pair: the target is asked for an offer, the offer is brought to the draft, and the
two talk to each other from then on. Knows which plane they use, and tries again when a connection has ended. Whatever
fails, states travel inline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, replace
from typing import Any

from outrider.planes import PlaneKind, PlaneReport
from outrider.ports import ClosePlane, OfferPlane, PlaneChosen, PlaneCommand, RequestPlane
from outrider_coordinator.routing.replica import Replica

_log = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Before a pair is introduced again: at first, and at most, after it was in vain again and again."""

AnyReplica = Replica[Any, Any]
_NOT_YET = PlaneReport(PlaneKind.INLINE)


@dataclass(slots=True, eq=False)
class Introduction:
    """One target, one draft, and the connection between them."""

    target: AnyReplica
    draft: AnyReplica
    connection: int = 0
    """On both links; 0 while there is none."""
    report: PlaneReport = _NOT_YET
    retry_s: float = RETRY_S
    retry: asyncio.TimerHandle | None = None


class PlaneIntroductions:
    """All pairs of one coordinator."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._targets: list[AnyReplica] = []
        self._drafts: list[AnyReplica] = []
        self._pairs: dict[tuple[AnyReplica, AnyReplica], Introduction] = {}

    def target_attached(self, target: AnyReplica) -> None:
        """A target may be introduced."""
        self._targets.append(target)
        for draft in self._drafts:
            self._introduce(target, draft)

    def draft_attached(self, draft: AnyReplica) -> None:
        """A draft may be introduced."""
        self._drafts.append(draft)
        for target in self._targets:
            self._introduce(target, draft)

    def lost(self, replica: AnyReplica) -> None:
        """A replica's link has ended, and its ends of all connections with it; the other ends are told."""
        for known in (self._targets, self._drafts):
            if replica in known:
                known.remove(replica)
        for pair in [pair for pair in self._pairs if replica in pair]:
            self._forget(self._pairs.pop(pair))

    def close(self) -> None:
        """Stop introducing services to each other."""
        for found in self._pairs.values():
            if found.retry is not None:
                found.retry.cancel()
        self._pairs.clear()

    def connection(self, target: AnyReplica | None, draft: AnyReplica | None) -> int:
        """The number of the connection by which a target's states reach a draft; 0: inline."""
        if target is None or draft is None:
            return 0
        found = self._pairs.get((target, draft))
        return 0 if found is None else found.connection

    def reports(self) -> tuple[PlaneReport, ...]:
        """Of each pair, the plane between them."""
        return tuple(found.report for found in self._pairs.values())

    def lines(self) -> tuple[str, ...]:
        """The same for people, with the names of the two."""
        return tuple(
            f"from {_name(found.target)} to {_name(found.draft)}: {found.report.text()}"
            for found in self._pairs.values()
        )

    def on_event(self, replica: AnyReplica, event: OfferPlane | PlaneChosen) -> None:
        """A target's offer, or what either side says of a connection."""
        found = next((each for each in self._pairs.values() if event.connection == each.connection), None)
        if found is None or not event.connection or replica not in (found.target, found.draft):
            return  # it has been forgotten since
        if isinstance(event, PlaneChosen):
            self._note(found, event)
        elif replica is found.target:
            host = event.offer.host or _host_of(found.target)
            found.draft.connection.send_alone(replace(event, offer=replace(event.offer, host=host)))

    def _introduce(self, target: AnyReplica, draft: AnyReplica) -> None:
        offered, read = target.description, draft.description
        if offered is None or read is None or not read.hidden_state_layers:
            return
        if not set(offered.plane_kinds) & set(read.plane_kinds):
            return
        found = self._pairs.setdefault((target, draft), Introduction(target, draft))
        found.retry, found.connection = None, next(self._numbers)
        target.connection.send_alone(RequestPlane(found.connection))

    def _note(self, found: Introduction, event: PlaneChosen) -> None:
        found.report = event.report
        _log.info("hidden states from %s to %s: %s", _name(found.target), _name(found.draft), event.report.text())
        if not event.is_closed:
            found.retry_s = RETRY_S
            return
        self._forget(found)
        again = asyncio.get_running_loop().call_later(found.retry_s, self._introduce, found.target, found.draft)
        found.retry, found.retry_s = again, min(2 * found.retry_s, LONGEST_RETRY_S)

    def _forget(self, found: Introduction) -> None:
        """Let go of the connection on both sides; on a link that is lost that goes nowhere."""
        if found.retry is not None:
            found.retry.cancel()
        if found.connection:
            command: PlaneCommand = ClosePlane(found.connection)
            found.connection = 0
            found.target.connection.send_alone(command)
            found.draft.connection.send_alone(command)


def _host_of(target: AnyReplica) -> str:
    """Where the coordinator reaches a target, which listens at every address."""
    host = target.name.rpartition(":")[0].strip("[]")
    return host if host and not target.name.startswith("unix:") else "127.0.0.1"


def _name(replica: AnyReplica) -> str:
    return replica.name or "this process"
