"""A batch as one row of numbers, which come to a GPU together.

Owns the layout: all numbers of a ``ForwardBatch`` as int32, one kind after the other, pages last because their number
changes most. A batch may be laid out larger than it is: the tokens added have slot -1 and belong to no row, the
rows added have no queries.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.kernels.paged_attention import DevicePlan, PagedRows, RowSpan, plan_attention
from outrider.kv_cache import PageTable, page_table_of
from outrider.kv_cache.state_slots import NUM_COLUMNS
from outrider.model_executor.input_batch import ForwardBatch
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch, StateInputs

_NO_SLOT = -1
"""Slot of a token whose keys and values are not stored."""
IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Shape of a launch; any batch that is no larger fits it."""

    num_rows: int
    num_tokens: int
    max_queries: int
    """Largest number of queries of one row."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> BatchShape:
        """The batch's own."""
        counts = map(operator.sub, batch.query_starts[1:], batch.query_starts)
        return cls(batch.num_rows, len(batch.token_ids), max(counts, default=0))

    def holds(self, other: BatchShape) -> bool:
        """True if a batch of the ``other`` shape can be laid out in this one."""
        return (
            other.num_rows <= self.num_rows
            and other.num_tokens <= self.num_tokens
            and other.max_queries <= self.max_queries
        )

    @property
    def num_fixed(self) -> int:
        """Numbers before the pages."""
        return 4 * self.num_tokens + 3 * self.num_rows + 2


@dataclass(frozen=True, slots=True)
class BatchFrame:
    """Properties that all batches of a model share."""

    page_size: int
    windows: tuple[int | None, ...]
    """Windows of the KV cache groups."""
    counters: torch.Tensor
    """Counters of ``PagedRows``."""
    sinks: tuple[int, ...] = ()
    """Attention sinks of the KV cache groups; those that are not named have none."""
    batch_invariant: bool = False
    has_states: bool = False
    """True if there are recurrent layers: each row's slot and checkpoints come before the pages."""
    window_map: torch.Tensor | None = None
    """Window page of each page, of groups with a window where others have none; None: all have the same pages."""

    def num_of_states(self, num_rows: int) -> int:
        """Numbers between the fixed ones of a shape and the pages."""
        return NUM_COLUMNS * num_rows if self.has_states else 0

    @property
    def reaches(self) -> Iterator[tuple[int | None, int]]:
        """Window and sinks of each KV cache group."""
        return itertools.zip_longest(self.windows, self.sinks, fillvalue=0)

    def attention_inputs(self, slots: torch.Tensor, rows: PagedRows) -> tuple[AttentionInputs, ...]:
        """Attention inputs of each KV cache group; all share slots and page tables, which are mapped in a forward."""
        return tuple(
            AttentionInputs(
                slots,
                DevicePlan(rows, self.page_size, window, sinks, self.batch_invariant),
                None if window is None else self.window_map,
            )
            for window, sinks in self.reaches
        )

    def mapped(self, batch: ForwardBatch) -> ForwardBatch:
        """A batch on a CPU with the slots and page tables of groups that have window pages."""
        if self.window_map is None:
            return batch
        pages_of, size = self.window_map.numpy(), self.page_size
        slots = [int(pages_of[slot // size]) * size + slot % size for slot in batch.slots]
        tables = [page_table_of(pages_of[np.frombuffer(table, dtype=np.int32)].tolist()) for table in batch.page_tables]
        return replace(batch, slots=slots, page_tables=tables)


def pack(batch: ForwardBatch, shape: BatchShape) -> IntArray:
    """The batch in one array, laid out as ``shape``."""
    page_starts = starts_of(batch.page_tables)
    num_tokens, num_pages = len(batch.token_ids), page_starts[-1]
    return join_padded(
        (
            (batch.token_ids, shape.num_tokens, 0),
            (batch.positions, shape.num_tokens, 0),
            (batch.slots, shape.num_tokens, _NO_SLOT),
            (batch.logit_indices, shape.num_tokens, 0),
            (batch.query_starts, shape.num_rows + 1, num_tokens),
            (batch.context_lengths, shape.num_rows, 0),
            (page_starts, shape.num_rows + 1, num_pages),
        ),
        batch.page_tables,
    )


def starts_of(page_tables: Iterable[Sequence[int]]) -> list[int]:
    """Offsets of each row's pages when rows lie one after the other, and the end of the last row's."""
    return list(itertools.accumulate(map(len, page_tables), initial=0))


def join_padded(parts: Iterable[tuple[Sequence[int], int, int]], page_tables: Iterable[PageTable]) -> IntArray:
    """Parts, each filled up: (numbers, how many they are to be, with what), and the pages after them."""
    fixed: list[int] = []
    numbers = array("i")
    for values, size, filler in parts:
        if isinstance(values, array):  # of a long row: it is copied as it is
            numbers.extend(array("i", fixed))
            numbers.extend(values)
            fixed = []
        else:
            fixed += values
        fixed += [filler] * (size - len(values))
    numbers.extend(array("i", fixed))
    numbers.frombytes(b"".join(page_tables))  # most of the numbers: they need no conversion
    return np.frombuffer(numbers, dtype=np.int32)


def fill_parts(
    parts: Iterable[tuple[NDArray[np.integer], int, int]], pages: NDArray[np.int32], num_fixed: int
) -> IntArray:
    """``join_padded`` of arrays, whose sizes come to ``num_fixed``."""
    numbers = np.empty(num_fixed + len(pages), dtype=np.int32)
    start = 0
    for values, size, filler in parts:
        stop = start + len(values)
        numbers[start:stop] = values
        start += size
        if stop < start:
            numbers[stop:start] = filler
    numbers[start:] = pages
    return numbers


def unpack(
    buffer: torch.Tensor,
    shape: BatchShape,
    frame: BatchFrame,
    num_logits: int,
    *,
    spans: tuple[RowSpan, ...] = (),
) -> DeviceBatch:
    """Views of a buffer on the device that holds, or will hold, what ``pack`` gave; ``spans`` as ``PagedRows`` has
    them.
    """
    token_ids, positions, slots, logit_indices, query_starts, context_lengths, page_starts = torch.split(
        buffer[: shape.num_fixed], _sizes(shape)
    )
    num_of_states = frame.num_of_states(shape.num_rows)
    states = None
    if num_of_states:
        columns = buffer[shape.num_fixed : shape.num_fixed + num_of_states].view(NUM_COLUMNS, -1)
        states = StateInputs(shape.max_queries, query_starts, context_lengths, slots, *columns)
    paged = PagedRows(
        query_starts=query_starts,
        context_lengths=context_lengths,
        page_starts=page_starts,
        pages=buffer[shape.num_fixed + num_of_states :],
        max_queries=shape.max_queries,
        counters=frame.counters,
        spans=spans,
    )
    groups = frame.attention_inputs(slots, paged)
    return DeviceBatch(token_ids, positions, groups, logit_indices[:num_logits], states)


def spans_in(numbers: IntArray, shape: BatchShape) -> tuple[RowSpan, ...]:
    """Spans of the rows of a batch that ``pack`` laid out in its own shape."""
    parts = np.split(numbers, np.cumsum(_sizes(shape)))
    query_starts, context_lengths, page_starts = (part.tolist() for part in parts[4:7])
    rows = zip(itertools.pairwise(query_starts), context_lengths, page_starts, strict=False)
    return tuple(RowSpan(first, end - first, context, page) for (first, end), context, page in rows)


def _sizes(shape: BatchShape) -> list[int]:
    """Numbers of each kind before the pages."""
    tokens, rows = shape.num_tokens, shape.num_rows
    return [tokens, tokens, tokens, tokens, rows + 1, rows, rows + 1]


def inputs_on_cpu(batch: ForwardBatch, frame: BatchFrame, dtype: torch.dtype) -> DeviceBatch:
    """A batch for PyTorch's own operations, which plan attention row by row."""
    device, windowed = torch.device("cpu"), frame.mapped(batch)
    groups = []
    for window, sinks in frame.reaches:
        own = batch if window is None else windowed
        plan = plan_attention(
            own, page_size=frame.page_size, window=window, num_sinks=sinks, device=device, dtype=dtype
        )
        groups.append(AttentionInputs(torch.tensor(own.slots), plan))
    return DeviceBatch(
        token_ids=torch.tensor(batch.token_ids),
        positions=torch.tensor(batch.positions),
        groups=tuple(groups),
        logit_indices=torch.tensor(batch.logit_indices, dtype=torch.int64),
        states=_states_on_cpu(batch) if frame.has_states else None,
    )


def _states_on_cpu(batch: ForwardBatch) -> StateInputs:
    columns = (batch.query_starts, batch.context_lengths, batch.slots, *batch.states)
    most = BatchShape.of(batch).max_queries
    return StateInputs(most, *(torch.tensor(column, dtype=torch.int32) for column in columns))


def logit_indices_in(buffer: torch.Tensor, shape: BatchShape, num_logits: int) -> torch.Tensor:
    """Logit indices alone, as ``unpack`` gives them."""
    start = 3 * shape.num_tokens
    return buffer[start : start + num_logits]
