"""Input batch of one forward whose rows are columns: many running sessions, laid out without a value for each.

Owns what ``input_batch`` and ``device_inputs`` own of single rows. Refuses to know tensors and devices.

Shape letters: ``B`` rows, ``C`` committed and ``D`` draft tokens of all of them, ``T`` both, ``N`` positions that get
logits, ``P`` pages of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kv_cache import JoinedPages, KVCacheManager, KVSequence, PageCopy
from outrider.model_executor.device_inputs import BatchShape, IntArray, fill_parts

Ints = NDArray[np.int64]
_PATTERNS_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Append committed tokens and drafts to sequences, which all differ and have room, and score the drafts."""

    sequences: Sequence[KVSequence]  # [B]
    lengths: Ints  # [B] tokens of each that are kept
    token_ids: NDArray[np.integer]  # [C]
    counts: Ints  # [B] of those, at least one
    draft_token_ids: NDArray[np.integer]  # [D]
    num_drafts: Ints  # [B]

    @classmethod
    def plain(cls, sequences: Sequence[KVSequence], lengths: Ints, token_ids: NDArray[np.integer] | None) -> RowColumns:
        """One token [B] each, and no draft; None: the device alone knows them, and sequences get zeros."""
        ones, none = np.ones(len(sequences), dtype=np.int64), np.zeros(len(sequences), dtype=np.int64)
        return cls(sequences, lengths, none if token_ids is None else token_ids, ones, none[:0], none)

    @classmethod
    def drawn(cls, sequences: Sequence[KVSequence]) -> RowColumns:
        """One token each, which the device alone knows, after all that they hold."""
        lengths = np.array([sequence.length for sequence in sequences], dtype=np.int64)
        return cls.plain(sequences, lengths, None)

    def tails(self) -> list[list[int]]:
        """The tokens that are appended to each."""
        ids, drafts = self.token_ids.tolist(), self.draft_token_ids.tolist()
        if len(ids) == len(self.sequences) and not drafts:
            return [[token_id] for token_id in ids]
        ends, draft_ends = self.counts.cumsum().tolist(), self.num_drafts.cumsum().tolist()
        spans = zip([0, *ends], ends, [0, *draft_ends], draft_ends, strict=False)
        return [ids[start:stop] + drafts[first:last] for start, stop, first, last in spans]


@dataclass(frozen=True, slots=True)
class RowPattern:
    """What depends on the numbers of tokens alone, which are mostly those of the step before."""

    rows: NDArray[np.intp]  # [T] of each token
    places: Ints  # [T] of each token in its row
    order: NDArray[np.intp]  # [T] of each token, among the committed ones and after them the drafts
    drafts: NDArray[np.intp] | slice  # [D] places of the drafts among all tokens; of one row, which are neighbours
    logit_indices: NDArray[np.intp]  # [N]
    query_starts: Ints  # [B + 1]
    shape: BatchShape

    @classmethod
    def of(cls, counts: Ints, num_drafts: Ints) -> RowPattern:
        """Of rows with so many committed tokens and drafts."""
        totals = counts + num_drafts
        starts = np.concatenate(([0], totals.cumsum()))
        rows = np.arange(len(totals)).repeat(totals)
        places = np.arange(len(rows)) - starts[rows]
        is_draft = places >= counts[rows]
        order = np.empty(len(rows), dtype=np.intp)
        order[~is_draft] = np.arange(int(counts.sum()))
        order[is_draft] = np.arange(int(counts.sum()), len(rows))
        shape = BatchShape(len(totals), len(rows), int(totals.max()))
        logit_indices = np.flatnonzero(places >= counts[rows] - 1)
        drafts = np.flatnonzero(is_draft) if len(totals) > 1 else slice(int(counts[0]), len(rows))
        return cls(rows, places, order, drafts, logit_indices, starts, shape)


@dataclass(frozen=True, slots=True)
class ColumnsBatch:
    """One ragged forward, as ``ForwardBatch`` has it."""

    pattern: RowPattern
    token_ids: NDArray[np.integer]  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    context_lengths: Ints  # [B]
    pages: JoinedPages
    page_copies: tuple[PageCopy, ...]

    @property
    def num_logits(self) -> int:
        """N."""
        return len(self.pattern.logit_indices)

    def put_drafts(self, numbers: IntArray, draft_token_ids: NDArray[np.integer]) -> None:
        """Set the drafts [D] in what ``pack`` gave, of which token ids come first."""
        numbers[self.pattern.drafts] = draft_token_ids

    def pack(self, shape: BatchShape) -> IntArray:
        """The batch in one array, laid out as ``shape``, as ``device_inputs.pack`` does it."""
        pattern, tokens, rows, page_starts = self.pattern, shape.num_tokens, shape.num_rows, self.pages.starts
        parts = (
            (self.token_ids, tokens, 0),
            (self.positions, tokens, 0),
            (self.slots, tokens, -1),
            (pattern.logit_indices, tokens, 0),
            (pattern.query_starts, rows + 1, pattern.shape.num_tokens),
            (self.context_lengths, rows, 0),
            (page_starts, rows + 1, page_starts[-1]),
        )
        return fill_parts(parts, self.pages.pages, shape.num_fixed)


def plan_rows(table: KVCacheManager, columns: RowColumns) -> ColumnsBatch:
    """Lay a batch out before its sequences are truncated to what is kept and extended: these have pages for that.
    ``OutOfPagesError``, without a change, if there are too few.
    """
    counts, num_drafts = columns.counts, columns.num_drafts
    pattern = _pattern_of(counts.tobytes(), num_drafts.tobytes())
    pages = table.make_room(columns.sequences, columns.lengths, counts + num_drafts)
    positions = pattern.places + columns.lengths[pattern.rows]
    return ColumnsBatch(
        pattern,
        np.concatenate((columns.token_ids, columns.draft_token_ids))[pattern.order],
        positions,
        pages.slots(positions, pattern.rows),
        columns.lengths + counts + num_drafts,
        pages,
        tuple(table.pending_copies()),
    )


@functools.lru_cache(_PATTERNS_REMEMBERED)
def _pattern_of(counts: bytes, num_drafts: bytes) -> RowPattern:
    return RowPattern.of(np.frombuffer(counts, dtype=np.int64), np.frombuffer(num_drafts, dtype=np.int64))
