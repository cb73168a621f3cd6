"""Readiness of a service for a session, what a session's two sides share, and how often it may be lost."""

from __future__ import annotations

import abc
import enum

from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.table import Row

MAX_LOSSES_IN_A_ROW = 5
"""Losses of a session without an answer between; past this number a draft is left alone, and targets get the session
while no other such one is with them."""
MAX_LOSSES_ALONE = 15
"""Further losses after which a session fails. Kills from outside hit one that is alone, too: 50 kills 4 to 9 s apart
broke a session with a long prompt six times more."""


class Readiness(enum.Enum):
    """State of a session at a service, by which it may be used or not."""

    CLOSED = "closed"
    """Session not open on the service; may be opened."""
    OPEN = "open"
    AWAY = "away"
    """The service cannot be reached, or has no room for this session now."""
    GONE = "gone"
    """State of a side that is of no more use to this session."""


_READINESS = (Readiness.OPEN, Readiness.CLOSED, Readiness.AWAY, Readiness.GONE)
"""Readiness by the value that ``FLAGS`` hold of a side: its higher bit is set where the side may not be used."""
_READINESS_BITS = {readiness: bits for bits, readiness in enumerate(_READINESS)}


class ServiceSide(abc.ABC):
    """State of a session on its draft or its target."""

    opened: int
    """The generation of the latest ``Open``."""
    held: int
    """Committed tokens that the service is known to hold."""

    def __init__(self, row: Row, shift: int, readiness: Readiness) -> None:
        """``shift``: the first of the bits of ``FLAGS`` that hold the readiness."""
        self.row, self._shift = row, shift
        self.readiness, self.opened = readiness, -1
        self.is_lost = False
        """Flag of a service that held the session and lost it: opening it again rebuilds it."""

    @property
    def readiness(self) -> Readiness:
        """Readiness of the service for the session."""
        return _READINESS[self.row.values.item(col.FLAGS) >> self._shift & 3]

    @readiness.setter
    def readiness(self, readiness: Readiness) -> None:
        values = self.row.values
        values[col.FLAGS] = values.item(col.FLAGS) & ~(3 << self._shift) | _READINESS_BITS[readiness] << self._shift

    def note_opened(self, generation: int) -> None:
        """An ``Open`` of that generation is sent."""
        self.readiness, self.opened, self.is_lost = Readiness.OPEN, generation, False

    def lose(self, readiness: Readiness) -> None:
        """The service lost the session."""
        self.is_lost = self.is_lost or self.held > 0
        self.reset(readiness)

    @abc.abstractmethod
    def reset(self, readiness: Readiness) -> None:
        """The service holds nothing of this session any more, and owes no answer."""
