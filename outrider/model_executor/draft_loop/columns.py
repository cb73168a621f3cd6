"""Rows of a draft loop as arrays: sessions that draw together, laid out without a value for each.

Owns what ``rows`` and ``plan`` own of single rows. Refuses to know devices.

Shape letters: ``B`` rows, ``T`` tokens of all rows.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.draft_sampling.layout import NUM_COLUMNS, Column
from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.kv_cache.page_tables import slots_in
from outrider.model_executor.device_inputs import IntArray
from outrider.model_executor.draft_loop.plan import DraftPlan
from outrider.model_executor.draft_loop.rows import DraftMetadata, DraftRow

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MetadataColumns:
    """``DraftMetadata`` of sessions."""

    each: Sequence[DraftMetadata]  # [B]
    words: IntArray  # [B, NUM_COLUMNS]
    keys_base: IntArray  # [B] 1 where the base keys the random streams, else 0
    is_uniform: bool
    """Whether evidence is of one form, or none has any."""

    @classmethod
    def of(cls, metadata: Sequence[DraftMetadata]) -> MetadataColumns:
        """Of these."""
        words = np.frombuffer(b"".join([one.words for one in metadata]), dtype=np.int32)
        keys_base = np.array([one.keys_base for one in metadata], dtype=np.int32)
        forms = {(one.needs_evidence, one.is_certain) for one in metadata}
        return cls(list(metadata), words.reshape(-1, NUM_COLUMNS), keys_base, len(forms) == 1)

    def selected(self, places: NDArray[np.intp]) -> MetadataColumns:
        """Of those at these places."""
        return MetadataColumns.of([self.each[place] for place in places.tolist()])

    @property
    def needs_evidence(self) -> bool:
        """Whether the device reports what it draws from, where that is uniform."""
        return self.each[0].needs_evidence

    @property
    def is_certain(self) -> bool:
        """Whether evidence is one-hot, where that is uniform."""
        return self.each[0].is_certain


@dataclass(frozen=True, slots=True)
class DraftColumns:
    """Append tokens to sequences, which all differ and have room, and draw what follows."""

    sequences: Sequence[KVSequence]  # [B]
    metadata: MetadataColumns
    bases: Ints  # [B] committed tokens
    token_ids: NDArray[np.integer]  # [T]
    counts: Ints  # [B] of those, as ``DraftRow.token_ids``
    num_drafts: Ints  # [B]
    lag: int = 0
    """First tokens of the texts that the sequences lack."""

    @property
    def contexts(self) -> Ints:  # [B]
        """Tokens of each sequence before the first draw."""
        return self.bases - self.lag if self.lag else self.bases

    @property
    def lengths(self) -> Ints:  # [B]
        """Tokens of each sequence that are kept."""
        return self.contexts - self.counts

    def words(self) -> IntArray:  # [B, NUM_COLUMNS]
        """``DraftRow.words`` of each."""
        words = self.metadata.words.copy()
        words[:, Column.BASE] = self.bases * self.metadata.keys_base
        words[:, Column.POSITION] = self.bases
        words[:, Column.LENGTH] = self.num_drafts
        return words

    def rows(self) -> list[DraftRow]:
        """One by one; their sequences are to be truncated to what is kept."""
        heads = zip(
            self.metadata.each, self.sequences, self.texts(), self.num_drafts.tolist(), self.bases.tolist(), strict=True
        )
        return [DraftRow(*head, self.lag) for head in heads]

    def texts(self) -> list[list[int]]:
        """The tokens that are appended to each."""
        ids, ends = self.token_ids.tolist(), itertools.accumulate(self.counts.tolist(), initial=0)
        return [ids[start:stop] for start, stop in itertools.pairwise(ends)]


def plan_columns(table: KVCacheManager, columns: DraftColumns) -> DraftPlan:
    """``plan_draft`` of columns, before their sequences are truncated to what is kept and extended: these have pages
    for that.
    """
    lengths, counts, num_drafts = columns.lengths, columns.counts.tolist(), columns.num_drafts.tolist()
    pages = table.make_room(columns.sequences, lengths, columns.counts + columns.num_drafts - 1)
    size, positions, slots = pages.page_size, list[int](), list[int]()
    for own, start, count in zip(pages.tables, lengths.tolist(), counts, strict=True):
        index, offset = divmod(start, size)
        if offset + count <= size:
            first = own[index] * size + offset
            slots += range(first, first + count)
        else:
            slots += slots_in(own[index:], offset, count, size)
        positions += range(start, start + count)
    return DraftPlan(
        columns.token_ids.tolist(),
        positions,
        slots,
        list(itertools.accumulate(counts)),
        columns.contexts.tolist(),
        pages.tables,
        array("i", columns.words().tobytes()),
        num_steps=max(num_drafts),
        catch_up=max(counts),
        page_copies=tuple(table.pending_copies()),
    )
