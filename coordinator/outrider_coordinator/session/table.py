"""Session table: the state of a coordinator's sessions that every step reads or writes, as arrays.

A row for each session, a column (``table_columns``) for each property, of target and draft. A session is a view of its
row: transitions of many sessions (``transitions``) and of one (``steps``, ``target_events``, ``draft_events``) work on
the same numbers. A session that is not in a table has a row of its own.

Shape letters: ``R`` rows, ``C`` columns, ``W`` positions of the longest proposal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.batched import U4, Column
from outrider.limits import MAX_DRAFT_LENGTH
from outrider_coordinator.session import table_columns as col

if TYPE_CHECKING:
    from outrider_coordinator.session.state import SessionState

Ints = NDArray[np.int64]

ANY_LENGTH = 1 << 40
"""Capacity of a draft without a limit: longer than any text."""
NO_TOKEN = (1 << 32) - 1
"""Padding behind the tokens of a proposal: no token of a vocabulary."""
_WIDTH = MAX_DRAFT_LENGTH + 1
_FEWEST_ROWS = 8
"""Rows of the first allocation, which doubles when it is full."""


class Row:
    """One session's row: in a table, or alone."""

    __slots__ = ("drafted", "evidence", "index", "values")

    def __init__(self) -> None:
        self.values: Ints = np.zeros(col.NUM_COLUMNS, dtype=np.int64)  # [C]
        self.drafted: Column = np.full(_WIDTH, NO_TOKEN, dtype=U4)  # [W]
        """Draft tokens of this step's proposal."""
        self.evidence: Any = None
        """Evidence of the proposal: ``Evidence``, or a place in a message (``ProposedSupports``)."""
        self.index = -1
        """Index in the table; -1: in none."""


class IntColumn:
    """Attribute of a view that is a column of its row."""

    def __init__(self, column: int) -> None:
        self._column = column

    def __get__(self, view: HasRow, owner: type | None = None) -> int:
        return view.row.values.item(self._column)

    def __set__(self, view: HasRow, value: int) -> None:
        view.row.values[self._column] = value


class Flag:
    """Attribute of a view that is a bit of ``FLAGS``."""

    def __init__(self, bit: int) -> None:
        self._bit = bit

    def __get__(self, view: HasRow, owner: type | None = None) -> bool:
        return bool(view.row.values.item(col.FLAGS) & self._bit)

    def __set__(self, view: HasRow, value: bool) -> None:
        values = view.row.values
        values[col.FLAGS] = values.item(col.FLAGS) & ~self._bit | (self._bit if value else 0)


class HasRow(Protocol):
    """A view of a row."""

    row: Row


class SessionTable:
    """Rows of the sessions that run. Belongs to one event loop."""

    def __init__(self) -> None:
        self.sessions: list[SessionState | None] = []
        self._free: list[int] = []
        self._by_number: dict[int, int] = {}
        self._endings: Counter[int] = Counter()
        self.values: Ints = np.zeros((0, col.NUM_COLUMNS), dtype=np.int64)  # [R, C]
        self.drafted: Column = np.zeros((0, _WIDTH), dtype=U4)  # [R, W], NO_TOKEN behind each proposal

    def enter(self, session: SessionState, number: int) -> None:
        """Give the session a row, unless it has one; ``number`` names it on its links from now on."""
        row = session.row
        if row.index < 0:
            if not self._free:
                self._grow()
            row.index = index = self._free.pop()
            self.values[index], self.drafted[index] = row.values, row.drafted
            row.values, row.drafted = self.values[index], self.drafted[index]
            self.sessions[index] = session
            self._endings.update(session.output.ending_token_ids)
        else:
            self._by_number.pop(row.values.item(col.NUMBER), None)
        row.values[col.NUMBER] = number
        self._by_number[number] = row.index

    def leave(self, session: SessionState) -> None:
        """Free the session's row; it keeps its values."""
        row, index = session.row, session.row.index
        if index < 0:
            return
        row.values, row.drafted, row.index = row.values.copy(), row.drafted.copy(), -1
        self._by_number.pop(row.values.item(col.NUMBER), None)
        self.sessions[index] = None
        self.values[index] = 0
        self._free.append(index)
        self._endings.subtract(session.output.ending_token_ids)
        self._endings += Counter()  # drops those that are 0

    def indices(self, numbers: Iterable[int]) -> list[int]:
        """Row of each session with such a number; -1 for unknown ones."""
        find = self._by_number.get
        return [find(number, -1) for number in numbers]

    def may_end(self, token_ids: Iterable[int]) -> bool:
        """True if any of these tokens ends the generation of any session."""
        return not self._endings.keys().isdisjoint(token_ids)

    def _grow(self) -> None:
        before = len(self.sessions)
        size = max(_FEWEST_ROWS, 2 * before)
        for name in ("values", "drafted"):
            old = getattr(self, name)
            new = np.zeros((size, old.shape[1]), dtype=old.dtype)
            new[:before] = old
            setattr(self, name, new)
        self.sessions += [None] * (size - before)
        self._free = list(range(size - 1, before - 1, -1))
        for index, session in enumerate(self.sessions[:before]):
            if session is not None:
                session.row.values, session.row.drafted = self.values[index], self.drafted[index]
