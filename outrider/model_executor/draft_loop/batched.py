"""Rows of a draft loop as arrays: sessions that draw together, and the layout of their pages.

Knows no devices.

Shape letters: ``B`` rows, ``T`` tokens of all rows.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.draft_sampling.layout import NUM_COLUMNS, DrawColumn, Method
from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.kv_cache.page_tables import slots_in
from outrider.model_executor.device_inputs import IntArray
from outrider.model_executor.draft_loop.plan import DraftPlan
from outrider.model_executor.draft_loop.rows import DraftMetadata, DraftRow
from outrider.randomness.streams import Stream

_BASE, _POSITION, _LENGTH = int(DrawColumn.BASE), int(DrawColumn.POSITION), int(DrawColumn.LENGTH)
_OF_GUESSES = [int(column) for column in (DrawColumn.METHOD, DrawColumn.STREAM)]


@dataclass(frozen=True, slots=True)
class MetadataBatch:
    """``DraftMetadata`` of sessions."""

    each: Sequence[DraftMetadata]  # [B]
    words: IntArray  # [B, NUM_COLUMNS]
    keys_base: IntArray  # [B] 1 where the base keys the random streams, else 0
    is_uniform: bool
    """True if evidence is of one form, or none has any."""

    @classmethod
    def of(cls, metadata: Sequence[DraftMetadata]) -> MetadataBatch:
        """Batch of the given metadata."""
        words = np.frombuffer(bytearray().join([one.words for one in metadata]), dtype=np.int32)
        keys_base = np.array([one.keys_base for one in metadata], dtype=np.int32)
        forms = {(one.needs_evidence, one.is_certain) for one in metadata}
        return cls(list(metadata), words.reshape(-1, NUM_COLUMNS), keys_base, len(forms) == 1)

    def selected(self, indices: NDArray[np.intp]) -> MetadataBatch:
        """Batch of those at these indices."""
        return MetadataBatch.of([self.each[place] for place in indices.tolist()])

    @property
    def needs_evidence(self) -> bool:
        """True if the device reports what it draws from, where that is uniform."""
        return self.each[0].needs_evidence

    @property
    def is_certain(self) -> bool:
        """True if evidence is one-hot, where that is uniform."""
        return self.each[0].is_certain


@dataclass(slots=True)
class DraftBatch:
    """Append tokens to sequences, which all differ and have room, and draw what follows.

    Of as many rows as there mostly are, lists are read and made sooner than arrays.
    """

    sequences: Sequence[KVSequence]  # [B]
    metadata: MetadataBatch
    bases: Sequence[int]  # [B] committed tokens
    token_ids: list[int]  # [T]
    counts: Sequence[int]  # [B] of those, as ``DraftRow.token_ids``
    num_drafts: Sequence[int]  # [B]
    kv_offsets: Sequence[int] | None = None  # [B]
    """Values of ``DraftRow.kv_offset``; None: all are 0."""
    positions: Sequence[int] | None = None  # [B]
    """Tokens of each text before its first draw; None: ``bases``, no draft was appended before."""
    guessed_from: Sequence[int] | None = None  # [B]
    """The first draw of each guesses the bonus token of a target whose step has these bases; None: none does."""
    contexts: Sequence[int] = field(init=False)  # [B]
    """Tokens of each sequence before the first draw."""
    lengths: Sequence[int] = field(init=False)  # [B]
    """Tokens of each sequence that are kept."""
    texts: list[list[int]] = field(init=False)
    """The tokens that are appended to each."""

    def __post_init__(self) -> None:
        positions, kv_offsets = self.positions or self.bases, self.kv_offsets
        self.contexts = (
            [length - kv_offset for length, kv_offset in zip(positions, kv_offsets, strict=True)]
            if kv_offsets
            else positions
        )
        self.lengths = [context - count for context, count in zip(self.contexts, self.counts, strict=True)]
        ids, ends = self.token_ids, itertools.accumulate(self.counts)
        self.texts = [ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    @classmethod
    def of(cls, rows: Sequence[DraftRow]) -> DraftBatch:
        """Batch of rows that append to all that their sequences hold."""
        return cls(
            [row.sequence for row in rows],
            MetadataBatch.of([row.metadata for row in rows]),
            [row.base for row in rows],
            [token_id for row in rows for token_id in row.token_ids],
            [len(row.token_ids) for row in rows],
            [row.num_drafts for row in rows],
            [row.kv_offset for row in rows],
            [row.sequence.length + len(row.token_ids) + row.kv_offset for row in rows],
        )

    def words(self) -> IntArray:  # [B, NUM_COLUMNS]
        """Parameters of the draws, as the device reads them; valid until it is called again for the same sessions."""
        words = self.metadata.words
        words[:, _BASE] = self.bases
        words[:, _BASE] *= self.metadata.keys_base
        words[:, _POSITION] = self.positions or self.bases
        words[:, _LENGTH] = self.num_drafts
        return words if self.guessed_from is None else self._guessing(words.copy(), self.guessed_from)

    def _guessing(self, words: IntArray, bases: Sequence[int]) -> IntArray:
        """Draws of which the first is a guess; the others are those of a proposal after it."""
        words[:, DrawColumn.NEXT_BASE] = words[:, _BASE] + 1
        words[:, _BASE] = bases
        words[:, _OF_GUESSES] = int(Method.GROUPED), int(Stream.OUTSIDE)
        return words

    def rows(self) -> list[DraftRow]:
        """One by one; their sequences are to be truncated to what is kept."""
        kv_offsets = self.kv_offsets or [0] * len(self.sequences)
        heads = zip(
            self.metadata.each, self.sequences, self.texts, self.num_drafts, self.bases, kv_offsets, strict=True
        )
        return [DraftRow(*head) for head in heads]


def plan_draft_batch(table: KVCacheManager, batched: DraftBatch) -> DraftPlan:
    """Lay a loop out before its sequences are truncated to what is kept and extended: these have pages for that.
    ``OutOfPagesError``, without a change, if there are too few.
    """
    counts, num_drafts = batched.counts, batched.num_drafts
    if table.states is not None:
        table.require_states(batched.sequences, batched.lengths)
    appended = [count + drafts - 1 for count, drafts in zip(counts, num_drafts, strict=True)]
    pages = table.reserve(batched.sequences, batched.lengths, appended)
    size = pages.page_size
    positions: list[int] = []
    slots: list[int] = []
    for own, start, count in zip(pages.tables, batched.lengths, counts, strict=True):
        index, offset = divmod(start, size)
        if offset + count <= size:
            first = own[index] * size + offset
            slots += range(first, first + count)
        else:
            slots += slots_in(own[index:], offset, count, size)
        positions += range(start, start + count)
    return DraftPlan(
        batched.token_ids,
        positions,
        slots,
        list(itertools.accumulate(counts)),
        batched.contexts,
        pages.tables,
        array("i", batched.words().tobytes()),
        num_steps=max(num_drafts),
        num_prefill=max(counts),
        page_copies=tuple(table.pending_copies()),
        states=table.plan_states(batched.sequences, batched.lengths, counts, [max(num_drafts) - 1] * len(counts)),
    )


def restore_sequences(table: KVCacheManager, sequences: Sequence[KVSequence]) -> None:
    """Nothing came of a plan: give back the pages that it has taken. States may be half on their way."""
    table.lose_states(sequences)
    table.replace_tails(sequences, [sequence.length for sequence in sequences], [()] * len(sequences))
