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

from outrider.columns import CommandColumns, chain_rows
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES
from outrider.serving.session import Session
from outrider.serving.session_table import SessionTable
from outrider.serving.steady.step import Ints, SteadyStep

Rows = NDArray[np.intp]
Places = Rows | slice
"""Rows; all of them, in their order, as a slice, of which arrays are views."""


class WaitingSessions:
    """Sessions of one link that were answered together."""

    def __init__(self, table: SessionTable[Any], sessions: Sequence[Session[Any]], bases: Sequence[int]) -> None:
        """``bases``: the committed tokens of each, all computed; after them it may hold drafts."""
        hashes = [table.hash_ahead(session, base) for session, base in zip(sessions, bases, strict=True)]
        width = max(len(rests) for _, rests in hashes)
        openings = [session.open for session in sessions]
        self._table, self._sessions = table, sessions
        self._numbers = np.array([opening.session for opening in openings], dtype=np.uint64)
        self._order = np.argsort(self._numbers)
        self._every = np.arange(len(sessions))
        self._is_here = np.ones(len(sessions), dtype=np.bool_)
        self._generations = np.array([session.generation for session in sessions], dtype=np.uint64)
        self._bases = _ints(bases)
        self._lengths = _ints([session.sequence.length for session in sessions])
        self._num_hashed = _ints([len(rests) for _, rests in hashes])  # [B] lengths from the base on
        padded = [(*rests, *[0] * (width - len(rests))) for _, rests in hashes]
        self._rests = np.array(padded, dtype=np.uint64)  # [B, W]
        self._chains = chain_rows([chain for chain, _ in hashes])
        self._max_lengths = _ints([opening.max_length for opening in openings])
        self._reserved_lengths = _ints([session.reserved_length for session in sessions])
        self._num_token_ids = _ints([opening.num_token_ids for opening in openings])

    def forget(self, row: int) -> None:
        """Something else has come for a session."""
        self._is_here[row] = False

    def find(self, link_id: int, columns: CommandColumns, arrived_ns: int) -> SteadyStep | None:
        """The step that columns ask for; None unless all their sessions wait here and keep text that they have."""
        rows = self._rows_of(columns)
        if rows is None:
            return None
        kept = columns.num_kept_tokens.astype(np.int64)
        if not self._keep_their_text(columns, kept, rows):
            return None
        places = self._every[rows]
        return SteadyStep(
            link_id,
            columns,
            self._sessions if isinstance(rows, slice) else [self._sessions[row] for row in places.tolist()],
            places,
            kept,
            kept + columns.counts,
            columns.draft_lengths.astype(np.int64),
            self._max_lengths[rows],
            self._reserved_lengths[rows],
            self._num_token_ids[rows],
            arrived_ns,
        )

    def take(self, step: SteadyStep) -> None:
        """The sessions of a step that ``find`` has found wait no more."""
        self._is_here[step.rows] = False

    def _rows_of(self, columns: CommandColumns) -> Places | None:
        """Row of each session; None unless all are here, once, and the items are newer than what was answered."""
        asked = columns.sessions.astype(np.uint64, copy=False)
        rows: Places
        if np.array_equal(self._numbers, asked):  # as nearly always
            rows = slice(None)
        else:
            places = np.searchsorted(self._numbers, asked, sorter=self._order)
            if int(places.max()) >= self._numbers.size:
                return None
            rows = self._order[places]
            if not np.array_equal(self._numbers[rows], asked) or int(np.bincount(rows).max()) > 1:
                return None
        is_new = columns.generations > self._generations[rows]
        return rows if (is_new & self._is_here[rows]).all() else None

    def _keep_their_text(self, columns: CommandColumns, kept: Ints, rows: Places) -> bool:
        """Whether every item keeps what was committed, no more than is held, and names the text that it is."""
        ahead = kept - self._bases[rows]
        if int(ahead.min()) < 0 or (kept > self._lengths[rows]).any():
            return False
        is_known = ahead < self._num_hashed[rows]
        places = self._every[rows]
        same = self._rests[places, np.minimum(ahead, self._rests.shape[1] - 1)] == columns.rests
        has_chain = kept >= BLOCK_TOKENS
        if len(columns.chains) != CHAIN_BYTES * int(has_chain.sum()):
            return False
        chains = np.frombuffer(columns.chains, dtype=np.uint8).reshape(-1, CHAIN_BYTES)
        if len(chains):
            same[has_chain] &= (self._chains[rows][has_chain] == chains).all(axis=1)
        if is_known.all():
            return bool(same.all())
        return bool(same[is_known].all()) and all(
            self._table.prefix_hash(self._sessions[places[place]], int(kept[place]))
            == (chains[int(has_chain[:place].sum())].tobytes() if has_chain[place] else b"", int(columns.rests[place]))
            for place in np.flatnonzero(~is_known).tolist()
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
