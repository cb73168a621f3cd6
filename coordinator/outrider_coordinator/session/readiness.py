"""Readiness of a service for a session, as the session's row holds it, and how often a session may be lost."""

from __future__ import annotations

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


def readiness_of(row: Row, shift: int) -> Readiness:
    """Readiness in the bits of ``FLAGS`` from ``shift`` on."""
    return _READINESS[row.values.item(col.FLAGS) >> shift & 3]


def set_readiness(row: Row, shift: int, readiness: Readiness) -> None:
    """Set these bits."""
    values = row.values
    values[col.FLAGS] = values.item(col.FLAGS) & ~(3 << shift) | _READINESS_BITS[readiness] << shift
