"""Prepared answers: what rows of a session table wait for, and what follows from it, computed while services compute.

A cache: it is derived from the rows, holds while they have not changed (``is_of``), and is made anew where it does not.
Each kind has the commands of all sessions but for what the answers bring, and the rows as they will be.

Shape letters: ``B`` sessions, ``C`` columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import U4, U8, AnswerColumns
from outrider_coordinator.session import state_feed
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.table import Ints, SessionTable

Bools = NDArray[np.bool_]
Which = Ints | slice
"""Some of the sessions, or all of them as a slice, of which arrays are views."""
EVERY = slice(None)
NO_IDS = np.zeros(0, dtype=U4)


class Prepared:
    """Sessions of one target and one draft that wait for answers of one kind."""

    def __init__(self, table: SessionTable, index: Ints, rows: Ints, asked: int) -> None:  # [B], [B, C]
        """``rows``: their values. ``asked``: the column with the generations of what was asked."""
        self.table, self.index, self.rows = table, index, rows
        self.sessions: list[Any] = table.at(index.tolist())
        self.numbers = rows[:, col.NUMBER].astype(U8)
        self.speculations = [session.speculation for session in self.sessions]
        self._row_bytes = rows.tobytes()
        self._generations, self.bases = rows[:, asked].astype(U8).tobytes(), rows[:, col.LENGTH].astype(U4)
        self.flags: list[int] = rows[:, col.FLAGS].tolist()
        flags = self.flags
        self.is_sparse, self.reads_states = bool(flags[0] & col.IS_SPARSE), bool(flags[0] & col.READS_STATES)
        self.is_traced = bool(flags[0] & col.IS_TRACED)
        self.is_uniform = len({flag & (col.IS_SPARSE | col.READS_STATES) for flag in flags}) == 1
        """True if all are judged in the same way, and all or none are handed hidden states."""
        self.has_grammars = any(flag & col.HAS_GRAMMAR for flag in flags)
        self.limits = rows[:, col.LIMIT]
        self.limit = min(self.limits.tolist())

    def is_of(self, answers: AnswerColumns[Any]) -> bool:
        """True if these are answers to what was asked of just these sessions, whose rows have not changed since."""
        return (
            answers.generations.tobytes() == self._generations
            and answers.base_lengths.tobytes() == self.bases.tobytes()
            and self.table.values.take(self.index, axis=0).tobytes() == self._row_bytes
        )

    def hands_over_states(self) -> bool:
        """True if the target hands over the states of just what it scores, if the draft reads any."""
        return not self.reads_states or all(map(state_feed.hands_over_states, self.sessions))

    def hashes(self, kept: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Running hashes and chains of the first ``kept`` tokens of each session; the chain of none is empty."""
        found = [session.tokens.prefix_hash(count) for session, count in zip(self.sessions, kept, strict=True)]
        return [rest for _, rest in found], [chain for chain, _ in found]
