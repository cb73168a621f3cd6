"""Plane host: who serves the tensor plane's commands in a service. They are of no session, and no core sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.planes import PlaneKind, PlaneReport
from outrider.ports import ClosePlane, OfferPlane, PlaneChosen, PlaneCommand, PlaneEvent, RequestPlane
from outrider.readings import Reading

PLANE_COMMANDS = frozenset((RequestPlane, OfferPlane, ClosePlane))


class PlaneHost(Protocol):
    """Connections of one service's tensor plane; called by the engine thread. Nothing here waits."""

    def handle(self, link_id: int, command: PlaneCommand, tell: Callable[[PlaneEvent], None]) -> None:
        """Begin what a command asks for. ``tell`` sends events on its link, from any thread and at any time."""
        ...

    def drop_link(self, link_id: int) -> None:
        """End all connections of a link."""
        ...

    def readings(self) -> list[Reading]:
        """Figures of this moment; from any thread."""
        ...

    def close(self) -> None:
        """End all connections, and wait for that; idempotent."""
        ...


class NoPlanes:
    """Plane host of a service without a tensor plane; ``readings`` are what its role's metrics say then."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = readings

    def handle(self, link_id: int, command: PlaneCommand, tell: Callable[[PlaneEvent], None]) -> None:
        """Say so."""
        if not isinstance(command, ClosePlane):
            tell(refusal(command.connection, "the service has no tensor plane"))

    def drop_link(self, link_id: int) -> None:
        """Nothing to end."""

    def readings(self) -> list[Reading]:
        """Always the same."""
        return list(self._readings)

    def close(self) -> None:
        """Nothing to end."""


def refusal(connection: int, reason: str) -> PlaneChosen:
    """A connection that does not come about."""
    return PlaneChosen(connection, PlaneReport(PlaneKind.INLINE, reasons=(("others", reason),)), is_closed=True)
