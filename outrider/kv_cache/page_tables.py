"""Page tables of the sequences of one pool: how they take pages, own their last one, and give pages back.

Owns the copies of pages that a forward is to make first. Knows no prefix cache: which tokens may be found is the
``KVCacheManager``'s.

Shape letters: ``B`` sequences, ``P`` pages of all their tables, ``T`` tokens.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.sequence import KVSequence, PageTable, page_table_of
from outrider.kv_cache.window_pages import WindowPages

LONG_ROW = 256
"""Least number of tokens that are laid out as arrays: a list is faster for fewer."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class JoinedPages:
    """Page tables of sequences, as long as these do not change; and as arrays, one table after the other."""

    tables: Sequence[PageTable]  # [B]
    page_size: int

    @functools.cached_property
    def pages(self) -> NDArray[np.int32]:  # [P]
        """All of them."""
        return np.frombuffer(b"".join(self.tables), dtype=np.int32)

    @functools.cached_property
    def starts(self) -> Ints:  # [B + 1]
        """Start of each table, and the end of the last."""
        return np.array([0, *itertools.accumulate(map(len, self.tables))], dtype=np.int64)

    def slots(self, positions: Ints, rows: NDArray[np.intp] | None = None) -> Ints:  # [T] -> [T]
        """The slots of tokens at these positions of the sequences ``rows``; None: of one of each."""
        indices = positions // self.page_size
        starts = self.starts[:-1] if rows is None else self.starts[rows]
        found: Ints = (self.pages[starts + indices] - indices) * self.page_size + positions
        return found


class PageTables:
    """Changes the page tables of sequences over one pool."""

    def __init__(self, pool: PagePool, window: WindowPages | None = None) -> None:
        self.pool, self.window = pool, window
        self.pending_copies: dict[int, int] = {}
        """Destination -> source, both physical pages. All sources are read before any destination is written."""

    def pages_needed(self, sequence: KVSequence, count: int) -> int:
        """Number of free pages that extending by ``count`` tokens takes."""
        return self._num_missing(sequence.page_table, len(sequence.token_ids), count) if count else 0

    def own(self, sequence: KVSequence, index: int) -> None:
        """Replace a page that is shared or can be found by a copy, before a write into it. A page must be free."""
        table = sequence.page_table
        page = table[index]
        # A source that itself awaits a copy holds nothing yet: copy from where its content will come.
        source = self.pending_copies.get(page, page)
        window = self.window
        window_source = None if window is None else window.source_of(page)
        self._release(sequence, index, index + 1)
        after, room = (table[index - 1], 0) if index else (None, self.pool.pages_for(sequence.max_length))
        (table[index],) = self.pool.allocate(1, after=after, room=room)
        if table[index] != source:  # the pool may give the same page back when it has no other
            self.pending_copies[table[index]] = source
        if window is not None and window_source is not None:
            window.give_copy(table[index], window_source)

    def take(self, sequence: KVSequence, num_pages: int) -> None:
        """Take pages until there are ``num_pages``."""
        table = sequence.page_table
        first = len(table)
        if self.window is not None:
            self.window.pool.require(num_pages - first)
        if first == num_pages - 1 and table and (page := self.pool.allocate_next(table[-1])) is not None:
            table.append(page)  # as nearly always
        else:
            after = table[-1] if table else None
            room = 0 if table else self.pool.pages_for(sequence.max_length)
            table.extend(self.pool.allocate(num_pages - first, after=after, room=room))
        if self.window is not None:
            self.window.give(table[first:], after=table[first - 1] if first else None)

    def drop(self, sequence: KVSequence, num_kept: int) -> None:
        """Give back the pages after the first ``num_kept``."""
        table = sequence.page_table
        if len(table) <= num_kept:
            return
        self._release(sequence, num_kept, len(table))
        del table[num_kept:]
        if num_kept < sequence.holes.stop:
            sequence.holes = range(0)
        sequence.window_start = min(sequence.window_start, num_kept)

    def give_back(self, sequence: KVSequence, first: int, stop: int) -> None:
        """Give back the pages of the indices ``first`` to ``stop`` that are held yet; mostly there are none."""
        start = max(first, sequence.holes.stop)
        if start < stop:
            self._release(sequence, start, stop)
            sequence.page_table[start:stop] = page_table_of([0] * (stop - start))
            sequence.holes = range(first, stop)

    def leave_window(self, sequence: KVSequence, stop: int) -> None:
        """Give back the window pages before the index ``stop`` that are held yet."""
        if self.window is not None and sequence.window_start < stop:
            self.window.release(sequence.page_table[sequence.window_start : stop])
            sequence.window_start = stop

    def reserve(
        self, sequences: Sequence[KVSequence], lengths: Sequence[int] | Ints, counts: Sequence[int] | Ints
    ) -> JoinedPages:
        """Pages for ``counts`` [B] more tokens, at least one each, after the first ``lengths`` [B] that sequences hold;
        they may be written to from there on. Pages past those tokens stay. ``OutOfPagesError``, without a change, if
        too few are free.

        Row by row: of up to some 60 rows arrays take more time, and several times as much where caches are cold.
        """
        lengths, counts = _listed(lengths), _listed(counts)
        size, is_writable = self.pool.page_size, self.pool.is_writable
        tables = [sequence.page_table for sequence in sequences]
        most = len(tables) * (max(counts) // size + 2)
        if most > self.pool.num_free or (self.window is not None and most > self.window.pool.num_free):
            self._require_capacity(tables, lengths, counts)
        for sequence, table, start, count in zip(sequences, tables, lengths, counts, strict=True):
            if start + count > len(table) * size:
                self.take(sequence, -(-(start + count) // size))
            if not is_writable(table[start // size]):
                self.own(sequence, start // size)
        return JoinedPages(tables, size)

    def _require_capacity(self, tables: Sequence[PageTable], lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Raise ``OutOfPagesError`` unless there are pages for what ``reserve`` takes and copies."""
        num_missing = sum(map(self._num_missing, tables, lengths, counts))
        self.pool.require(num_missing)
        if self.window is not None:
            self.window.pool.require(num_missing)

    def _num_missing(self, table: PageTable, start: int, count: int) -> int:
        """Number of free pages that ``count`` tokens after the first ``start`` take, copies included: the copy of a
        page that no other sequence holds is made in the page's own place among the free ones.
        """
        size = self.pool.page_size
        is_shared = start // size < len(table) and self.pool.references(table[start // size]) > 1
        return max(0, -(-(start + count) // size) - len(table)) + is_shared

    def _release(self, sequence: KVSequence, start: int, stop: int) -> None:
        """Give up the pages of these indices that the sequence holds."""
        if self.window is not None:
            self.window.release(sequence.page_table[max(start, sequence.window_start) : stop])
        for page in self.pool.release(sequence.held_pages(start, stop)):
            self.pending_copies.pop(page, None)


def slots_in(pages: PageTable, offset: int, count: int, page_size: int) -> Sequence[int]:
    """The slots of ``count`` tokens in these pages, from ``offset`` in the first one on; an array of many."""
    if count < LONG_ROW:
        return [pages[place // page_size] * page_size + place % page_size for place in range(offset, offset + count)]
    firsts = np.frombuffer(pages, dtype=np.int32)[:, None] * page_size
    slots = (firsts + np.arange(page_size, dtype=np.int32)).reshape(-1)[offset : offset + count]
    return array("i", slots.tobytes())


def _listed(numbers: Sequence[int] | Ints) -> Sequence[int]:
    """List, which Python reads fastest."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
