"""Row batch: the rows of one forward as arrays, and their layout for the device.

A row is a sequence with the tokens that it appends: a prompt's chunk, a decode step, committed tokens with drafts to
score, or one token that only the device knows. Knows no tensors and no devices.

Shape letters: ``B`` rows, ``C`` committed and ``D`` draft tokens of all of them, ``T`` both, ``N`` positions that get
logits, ``P`` pages of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kv_cache import JoinedPages, KVCacheManager, KVSequence, PageCopy, StateRows
from outrider.kv_cache.page_tables import LONG_ROW
from outrider.model_executor.device_inputs import BatchShape, IntArray, fill_parts
from outrider.model_executor.input_batch import ForwardRow
from outrider.types import pack_token_ids

Ints = NDArray[np.int64]
_PATTERNS_REMEMBERED = 256
"""Shapes of batches whose index arrays are cached."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows that append committed tokens, and drafts after them, to sequences, which all differ and have room."""

    sequences: Sequence[KVSequence]  # [B]
    lengths: Ints  # [B] tokens of each that are kept
    token_ids: NDArray[np.integer]  # [C]
    counts: Ints  # [B] of those, at least one
    draft_token_ids: NDArray[np.integer]  # [D]
    num_drafts: Ints  # [B]
    num_logits: Ints | None = None  # [B]
    """Last tokens of each row that get logits; None: its last committed token and its drafts."""

    @classmethod
    def of(cls, rows: Sequence[ForwardRow]) -> RowBatch:
        """Rows that append tokens without drafts."""
        counts = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        none = np.zeros(len(rows), dtype=np.int64)
        return cls(
            [row.sequence for row in rows],
            np.array([row.sequence.length for row in rows], dtype=np.int64),
            _joined_ids([row.token_ids for row in rows]),
            counts,
            none[:0],
            none,
            np.array([row.num_logits for row in rows], dtype=np.int64),
        )

    @classmethod
    def joined(cls, first: RowBatch, second: RowBatch) -> RowBatch:
        """All rows of two batches."""
        return cls(
            [*first.sequences, *second.sequences],
            np.concatenate((first.lengths, second.lengths)),
            np.concatenate((first.token_ids, second.token_ids)),
            np.concatenate((first.counts, second.counts)),
            np.concatenate((first.draft_token_ids, second.draft_token_ids)),
            np.concatenate((first.num_drafts, second.num_drafts)),
            np.concatenate(
                [part.num_drafts + 1 if part.num_logits is None else part.num_logits for part in (first, second)]
            ),
        )

    @classmethod
    def plain(cls, sequences: Sequence[KVSequence], lengths: Ints, token_ids: NDArray[np.integer] | None) -> RowBatch:
        """One token [B] each, and no draft; None: the device alone knows them, and sequences get zeros."""
        ones, none = np.ones(len(sequences), dtype=np.int64), np.zeros(len(sequences), dtype=np.int64)
        return cls(sequences, lengths, none if token_ids is None else token_ids, ones, none[:0], none)

    @classmethod
    def drawn(cls, sequences: Sequence[KVSequence]) -> RowBatch:
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
    """Arrays that depend on the numbers of tokens alone, which are mostly those of the step before."""

    rows: NDArray[np.intp]  # [T] of each token
    indices: Ints  # [T] of each token in its row
    order: NDArray[np.intp]  # [T] of each token, among the committed ones and after them the drafts
    drafts: NDArray[np.intp] | slice  # [D] indices of the drafts among all tokens; of one row, which are neighbours
    logit_indices: NDArray[np.intp]  # [N]
    query_starts: Ints  # [B + 1]
    shape: BatchShape

    @classmethod
    def of(cls, counts: Ints, num_drafts: Ints, num_logits: Ints) -> RowPattern:
        """Pattern of rows with these numbers of committed tokens and drafts, and of logits for their last tokens."""
        totals = counts + num_drafts
        starts = np.concatenate(([0], totals.cumsum()))
        rows = np.arange(len(totals)).repeat(totals)
        indices = np.arange(len(rows)) - starts[rows]
        is_draft = indices >= counts[rows]
        order = np.empty(len(rows), dtype=np.intp)
        order[~is_draft] = np.arange(int(counts.sum()))
        order[is_draft] = np.arange(int(counts.sum()), len(rows))
        shape = BatchShape(len(totals), len(rows), int(totals.max()))
        logit_indices = np.flatnonzero(indices >= (totals - num_logits)[rows])
        drafts = np.flatnonzero(is_draft) if len(totals) > 1 else slice(int(counts[0]), len(rows))
        return cls(rows, indices, order, drafts, logit_indices, starts, shape)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """One ragged forward, as ``ForwardBatch`` has it."""

    pattern: RowPattern
    token_ids: NDArray[np.integer]  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    context_lengths: Ints  # [B]
    pages: JoinedPages
    page_copies: tuple[PageCopy, ...]
    states: StateRows | None = None
    """States of models with recurrent layers."""

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
        pages = self.pages.pages
        if self.states is not None:
            pages = np.concatenate((self.states.padded(rows), pages))
        return fill_parts(parts, pages, shape.num_fixed)


def plan_rows(table: KVCacheManager, batch: RowBatch) -> BatchLayout:
    """Lay a batch out before its sequences are truncated to what is kept and extended: these have pages for that.
    ``OutOfPagesError``, without a change, if there are too few.
    """
    if table.states is not None:
        table.require_states(batch.sequences, batch.lengths.tolist())
    counts, num_drafts, num_logits = batch.counts, batch.num_drafts, batch.num_logits
    wanted = b"" if num_logits is None else num_logits.tobytes()
    pattern = _pattern_of(counts.tobytes(), num_drafts.tobytes(), wanted)
    pages = table.reserve(batch.sequences, batch.lengths, counts + num_drafts)
    positions = pattern.indices + batch.lengths[pattern.rows]
    states = None
    if table.states is not None:
        lengths = batch.lengths.tolist()
        states = table.plan_states(batch.sequences, lengths, counts.tolist(), num_drafts.tolist())
    return BatchLayout(
        pattern,
        np.concatenate((batch.token_ids, batch.draft_token_ids))[pattern.order],
        positions,
        pages.slots(positions, pattern.rows),
        batch.lengths + counts + num_drafts,
        pages,
        tuple(table.pending_copies()),
        states,
    )


@functools.lru_cache(_PATTERNS_REMEMBERED)
def _pattern_of(counts: bytes, num_drafts: bytes, num_logits: bytes) -> RowPattern:
    committed, drafts = np.frombuffer(counts, dtype=np.int64), np.frombuffer(num_drafts, dtype=np.int64)
    return RowPattern.of(committed, drafts, np.frombuffer(num_logits, dtype=np.int64) if num_logits else drafts + 1)


def _joined_ids(texts: Sequence[Sequence[int]]) -> NDArray[np.integer]:
    if not any(len(ids) >= LONG_ROW for ids in texts):
        return np.array([token_id for ids in texts for token_id in ids], dtype=np.int64)
    return np.concatenate([np.frombuffer(pack_token_ids(ids), dtype="<i4") for ids in texts])
