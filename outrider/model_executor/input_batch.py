"""Input batch of one forward: rows, and the numbers that the kernels read.

Owns the ragged layout of a batch, in lists where its rows are short, which are made sooner than arrays. Refuses
to know tensors, devices and models: the runner moves a ``ForwardBatch`` to its device once, and nothing is worked out
again layer by layer.

Shape letters: ``T`` tokens of all rows, ``B`` rows, ``P`` pages of a row, ``N`` positions that get logits.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.errors import InvalidRequestError
from outrider.kv_cache import KVCacheManager, KVSequence, PageCopy, PageTable
from outrider.kv_cache.page_tables import LONG_ROW
from outrider.types import are_within, pack_token_ids


@dataclass(slots=True)  # frozen, it would take twice as long to make
class ForwardRow:
    """Append these tokens to this sequence."""

    sequence: KVSequence
    token_ids: TokenIds[int]
    num_logits: int = 1
    """Logits are wanted after each of the last this many of them; 0 for a prefill chunk that is not the last."""


@dataclass(slots=True)
class ForwardBatch:
    """One ragged forward: row b's tokens are ``token_ids[query_starts[b]:query_starts[b + 1]]``."""

    token_ids: TokenIds[int]  # [T], as the next two an array of 32-bit integers where a row is long
    positions: TokenIds[int]  # [T] of each token in its sequence
    slots: TokenIds[int]  # [T] where its KV goes: page * page_size + offset
    page_tables: list[PageTable]  # [B][P] pages of each row's context
    query_starts: list[int]  # [B+1]
    context_lengths: list[int]  # [B] tokens of the sequence, those of this forward included
    logit_indices: list[int]  # [N] rows of the hidden states that go through the head, in the order of the rows
    page_copies: tuple[PageCopy, ...]
    """Done before anything else: all sources are read before any destination is written."""
    states: TokenIds[TokenIds[int]] = ()  # [3][B] of models with recurrent layers, as ``StateRows`` has them

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.context_lengths)


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits against which the token ids of a row are checked."""

    max_model_len: int
    vocab_size: int

    def allows_one(self, token_id: int, length: int) -> bool:
        """True if ``check`` lets one token pass that brings its row to ``length``."""
        return length <= self.max_model_len and 0 <= token_id < self.vocab_size

    def check(self, token_ids: TokenIds[int], length: int) -> None:
        """Raise ``InvalidRequestError`` for ids of a row that they bring to ``length``."""
        if length > self.max_model_len:
            raise InvalidRequestError("token_ids", f"{length} tokens pass max_model_len {self.max_model_len}")
        if not are_within(token_ids, 0, self.vocab_size - 1):
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidRequestError("token_ids", f"{wrong} is not from 0 to {self.vocab_size - 1}")


def check_rows(table: KVCacheManager, rows: TokenIds[ForwardRow], limits: TokenLimits | None = None) -> None:
    """Raise ``InvalidRequestError`` unless every row can be planned and keeps to the limits; changes nothing."""
    seen: set[KVSequence] = set()
    for row in rows:
        if row.sequence in seen:
            raise InvalidRequestError("sequence", "stands in two rows of one forward")
        seen.add(row.sequence)
        count = len(row.token_ids)
        if count == 1 and row.num_logits in (0, 1) and table.has_room_for_one(row.sequence):
            if limits is not None and not limits.allows_one(row.token_ids[0], row.sequence.length + 1):
                limits.check(row.token_ids, row.sequence.length + 1)
            continue
        if not count:
            raise InvalidRequestError("token_ids", "a row needs at least one token")
        if not 0 <= row.num_logits <= count:
            raise InvalidRequestError("num_logits", f"must be from 0 to {count}, not {row.num_logits}")
        table.require_capacity(row.sequence, count)
        if limits is not None:
            limits.check(row.token_ids, row.sequence.length + count)


def plan_forward(table: KVCacheManager, rows: TokenIds[ForwardRow]) -> ForwardBatch:
    """Extend every row's sequence and lay the batch out; ``InvalidRequestError`` and no change if any row is bad."""
    check_rows(table, rows)
    return plan_checked(table, rows)


def plan_checked(table: KVCacheManager, rows: TokenIds[ForwardRow]) -> ForwardBatch:
    """``plan_forward`` of rows that ``check_rows`` has let pass."""
    is_long = any(len(row.token_ids) >= LONG_ROW for row in rows)
    token_ids, positions, slots = (array("i") if is_long else list[int]() for _ in range(3))
    logit_indices: list[int] = []
    query_starts = [0]
    context_lengths: list[int] = []
    page_tables: list[PageTable] = []
    end = 0
    for row in rows:
        sequence, ids = row.sequence, row.token_ids
        start = sequence.length
        if len(ids) == 1:  # as of nearly every running session, and so told with few calls
            slots.append(table.append_checked(sequence, ids[0]))
            token_ids.append(ids[0])
            positions.append(start)
            if row.num_logits:
                logit_indices.append(end)
            end += 1
            query_starts.append(end)
            context_lengths.append(start + 1)
            page_tables.append(sequence.page_table[:])
            continue
        length = start + len(ids)
        end += len(ids)
        slots.extend(table.extend_checked(sequence, ids))
        token_ids.extend(_as_array(ids) if len(ids) >= LONG_ROW else ids)
        positions.extend(_indices(start, length) if len(ids) >= LONG_ROW else range(start, length))
        logit_indices += range(end - row.num_logits, end)
        query_starts.append(end)
        context_lengths.append(length)
        page_tables.append(table.pages_of(sequence))
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        page_tables=page_tables,
        query_starts=query_starts,
        context_lengths=context_lengths,
        logit_indices=logit_indices,
        page_copies=tuple(table.pending_copies()),
    )


def _as_array(token_ids: TokenIds[int]) -> array[int]:
    return array("i", np.frombuffer(pack_token_ids(token_ids), dtype="<i4").astype(np.int32, copy=False).tobytes())


def _indices(start: int, stop: int) -> array[int]:
    return array("i", np.arange(start, stop, dtype=np.int32).tobytes())


class SequenceRow(Protocol):
    """A row of a forward or of a draft loop."""

    @property
    def sequence(self) -> KVSequence:
        """The sequence that the row extends."""
        ...


@contextlib.contextmanager
def restoring_lengths(table: KVCacheManager, rows: TokenIds[SequenceRow]) -> Iterator[None]:
    """Restore on an exception in the block: truncate the rows' sequences to the lengths that they had before it."""
    lengths = [row.sequence.length for row in rows]
    try:
        yield
    except BaseException:
        for row, length in zip(rows, lengths, strict=True):
            if row.sequence.length > length:
                table.truncate(row.sequence, length)
        raise
