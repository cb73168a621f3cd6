"""Session rows: what many sessions have in common as arrays, with an entry for each session."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Self

from outrider_coordinator.session.answered import Ints
from outrider_coordinator.session.state import SessionState


class SessionRows:
    """Sessions and arrays of them. Not changed once it is made."""

    _ROWS: ClassVar[tuple[str, ...]]
    """Fields with an entry for each session."""
    sessions: Sequence[SessionState]

    def _note_rows(self) -> None:
        """Derive what follows from all rows together."""
        raise NotImplementedError

    def selected(self, rows: Ints) -> Self:
        """These rows alone, in their order."""
        found = copy.copy(self)
        found.sessions = [self.sessions[row] for row in rows.tolist()]
        for name in self._ROWS:
            setattr(found, name, getattr(self, name)[rows])
        found._note_rows()
        return found
