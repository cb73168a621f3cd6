"""Introductions of targets to drafts that read their hidden states, so that the states need not pass through here.

Knows which plane each pair uses. Whatever fails, states travel inline.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.addresses import split_address
from outrider.planes import PlaneKind, PlaneReport
from outrider.ports import ClosePlane, OfferPlane, PlaneChosen, RequestPlane
from outrider.types import ModelDescription
from outrider_coordinator.routing.introductions import RETRY_S, AnyReplica, Introductions, name_of

_log = logging.getLogger(__name__)

_NOT_YET = PlaneReport(PlaneKind.INLINE)


class PlaneIntroductions(Introductions[PlaneReport]):
    """All pairs of one coordinator whose draft reads hidden states."""

    ending = ClosePlane

    def __init__(self) -> None:
        super().__init__(_NOT_YET)

    def connection(self, target: AnyReplica | None, draft: AnyReplica | None) -> int:
        """The number of the connection by which a target's states reach a draft; 0: inline."""
        found = self._found(target, draft)
        return 0 if found is None else found.connection

    def reports(self) -> tuple[PlaneReport, ...]:
        """Plane of each pair."""
        return tuple(found.state for found in self._pairs.values())

    def lines(self) -> tuple[str, ...]:
        """The same for people, with the names of the two."""
        return tuple(
            f"from {name_of(found.target)} to {name_of(found.draft)}: {found.state.text()}"
            for found in self._pairs.values()
        )

    def on_event(self, replica: AnyReplica, event: OfferPlane | PlaneChosen) -> None:
        """A target's offer, or what either side says of a connection."""
        found = self._introduction(replica, event.connection)
        if found is None:
            return
        if isinstance(event, OfferPlane):
            if replica is found.target:
                host = event.offer.host or _host_of(found.target)
                found.draft.send_alone(replace(event, offer=replace(event.offer, host=host)))
            return
        found.state = event.report
        _log.info("hidden states from %s to %s: %s", name_of(found.target), name_of(found.draft), event.report.text())
        if event.is_closed:
            self._try_again(found)
        else:
            found.retry_s = RETRY_S

    def _may_meet(self, target: ModelDescription, draft: ModelDescription) -> bool:
        return bool(draft.hidden_state_layers and set(target.plane_kinds) & set(draft.plane_kinds))

    def _request(self, connection: int) -> RequestPlane:
        return RequestPlane(connection)


def _host_of(target: AnyReplica) -> str:
    """Host at which the coordinator reaches a target that listens at every address."""
    host = split_address(target.name)[0]
    return host if host and not target.name.startswith("unix:") else "127.0.0.1"
