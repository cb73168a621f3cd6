"""Waiting sessions: those that were answered, as arrays against which columns of their next items are checked.

They are put down when their answers have left, while the device of somebody else computes. Owns what the next item may
keep of a session's text; what it may ask for is the executor's.

Shape letters: ``B`` sessions put down together, ``N`` of them asked for, ``W`` lengths that a session may keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import CommandColumns
from outrider.prefix_hash import chain_size
from outrider.serving.session_table import SessionTable
from outrider.serving.steady.sessions import Ints, SteadySessions
from outrider.serving.steady.step import SteadyStep

_NO_REST = 2**64 - 1
"""No running hash, which has 61 bits."""
Rows = NDArray[np.intp]
Places = Rows | slice
"""Rows; all of them, in their order, as a slice, of which arrays are views."""


class WaitingSessions:
    """Sessions of one link that were answered together."""

    def __init__(self, table: SessionTable[Any], own: SteadySessions, bases: Sequence[int]) -> None:
        """``bases``: the committed tokens of each, all computed; after them it may hold drafts."""
        sessions = own.sessions
        hashes = [table.hash_ahead(session, base) for session, base in zip(sessions, bases, strict=True)]
        width = max([len(rests) for _, rests in hashes])
        padded = [(*rests, *[_NO_REST] * (width + 1 - len(rests))) for _, rests in hashes]
        self._table, self._own = table, own
        self._every = np.arange(len(sessions))
        self._are_all_here = True
        self._is_here = np.ones(len(sessions), dtype=np.bool_)
        self._generations = np.array([session.generation for session in sessions], dtype=np.uint64)
        self._bases = np.array(bases, dtype=np.int64)
        self._rests = np.array(padded, dtype=np.uint64)  # [B, W + 1] of lengths from the base on, within its block
        self._chains = [chain for chain, _ in hashes]
        self._all_chains = b"".join(self._chains)

    def forget(self, row: int) -> None:
        """Something else has come for a session."""
        self._is_here[row] = self._are_all_here = False

    def find(self, link_id: int, columns: CommandColumns, arrived_ns: int) -> SteadyStep | None:
        """The step that columns ask for; None unless all their sessions wait here and keep text that they have."""
        rows = self._rows_of(columns)
        if rows is None:
            return None
        kept = columns.num_kept_tokens.astype(np.int64)
        if not self._keep_their_text(columns, kept, rows):
            return None
        own = self._own if isinstance(rows, slice) else self._own.selected(rows)
        lengths = columns.draft_lengths.astype(np.int64)
        return SteadyStep(link_id, columns, own, kept, kept + columns.counts, lengths, arrived_ns)

    def take(self, step: SteadyStep) -> None:
        """The sessions of a step that ``find`` has found wait no more."""
        places = self._own.keys
        self._is_here[[places[key] for key in step.keys]] = self._are_all_here = False

    def _rows_of(self, columns: CommandColumns) -> Places | None:
        """Row of each session; None unless all are here, once, and the items are newer than what was answered."""
        asked = columns.sessions.astype(np.uint64, copy=False)
        if asked.tobytes() == self._own.number_bytes:  # as nearly always
            is_new = are_all(columns.generations > self._generations)
            return slice(None) if is_new and self._are_all_here else None
        numbers, order = self._own.numbers, self._own.order
        places = np.searchsorted(numbers, asked, sorter=order)
        if int(places.max()) >= numbers.size:
            return None
        rows = order[places]
        if not np.array_equal(numbers[rows], asked) or int(np.bincount(rows).max()) > 1:
            return None
        return rows if ((columns.generations > self._generations[rows]) & self._is_here[rows]).all() else None

    def _keep_their_text(self, columns: CommandColumns, kept: Ints, rows: Places) -> bool:
        """Whether every item keeps what was committed, no more than is held, and names the text that it is."""
        ahead = kept - self._bases[rows]
        # One that keeps less than was committed, or more than was hashed, comes to the hash that no text has.
        places = np.minimum(ahead.view(np.uint64), np.uint64(self._rests.shape[1] - 1))
        if are_all(self._rests[self._every[rows], places] == columns.rests):
            chains = self._chains if isinstance(rows, slice) else [self._chains[row] for row in rows.tolist()]
            return columns.chains == (self._all_chains if isinstance(rows, slice) else b"".join(chains))
        return int(ahead.min()) >= 0 and self._are_their_texts(columns, kept, rows)

    def _are_their_texts(self, columns: CommandColumns, kept: Ints, rows: Places) -> bool:
        """Whether all keep the texts whose hashes they bring, hashed again: some end past a block."""
        start = 0
        for row, length, rest in zip(self._every[rows].tolist(), kept.tolist(), columns.rests.tolist(), strict=True):
            session, stop = self._own.sessions[row], start + chain_size(length)
            if length > session.sequence.length:
                return False
            if self._table.prefix_hash(session, length) != (columns.chains[start:stop], rest):
                return False
            start = stop
        return start == len(columns.chains)


def are_all(flags: NDArray[np.bool_]) -> bool:
    """Whether all are set: of few, a third of the time of ``flags.all()``."""
    return 0 not in flags.tobytes()
