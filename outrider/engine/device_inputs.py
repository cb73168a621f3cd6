"""Bringing a batch to a GPU in one copy.

Owns the layout: every array of a ``ForwardBatch`` as int32, one after the other in one buffer, pages last because their
number changes most. A batch may be laid out larger than it is: the tokens added have slot -1 and belong to no row, the
rows added have no queries. Refuses to know models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.batch import NO_PAGE, ForwardBatch
from outrider.engine.kernels.paged_attention import DevicePlan, PagedRows
from outrider.engine.models.decoder import DeviceBatch

_NO_SLOT = -1
IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a launch is made for; any batch that is no larger fits it."""

    num_rows: int
    num_tokens: int
    max_queries: int
    """Of one row."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> BatchShape:
        """The batch's own."""
        return cls(batch.num_rows, len(batch.token_ids), int(np.diff(batch.query_starts).max(initial=0)))

    def holds(self, other: BatchShape) -> bool:
        """Whether a batch of the ``other`` shape can be laid out in this one."""
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
    """What is the same for all batches of a model."""

    page_size: int
    windows: frozenset[int | None]
    counters: torch.Tensor
    """As ``PagedRows`` has them."""


def pack(batch: ForwardBatch, shape: BatchShape, *, pinned: bool) -> torch.Tensor:
    """The batch in one buffer of the host, laid out as ``shape``."""
    has_page = batch.page_tables != NO_PAGE  # [B, P]
    pages = batch.page_tables[has_page]
    page_starts = np.concatenate(([0], has_page.sum(1).cumsum()))
    host = torch.empty(shape.num_fixed + len(pages), dtype=torch.int32, pin_memory=pinned)
    numbers: IntArray = host.numpy()
    parts = (
        (batch.token_ids, shape.num_tokens, 0),
        (batch.positions, shape.num_tokens, 0),
        (batch.slots, shape.num_tokens, _NO_SLOT),
        (batch.logit_indices, shape.num_tokens, 0),
        (batch.query_starts, shape.num_rows + 1, len(batch.token_ids)),
        (batch.context_lengths, shape.num_rows, 0),
        (page_starts, shape.num_rows + 1, len(pages)),
        (pages, len(pages), 0),
    )
    start = 0
    for values, size, filler in parts:
        numbers[start : start + len(values)] = values
        numbers[start + len(values) : start + size] = filler
        start += size
    return host


def unpack(buffer: torch.Tensor, shape: BatchShape, frame: BatchFrame, num_logits: int) -> DeviceBatch:
    """Views of a buffer on the device that was, or will be, filled by ``pack``."""
    tokens, rows = shape.num_tokens, shape.num_rows
    token_ids, positions, slots, logit_indices, query_starts, context_lengths, page_starts = torch.split(
        buffer[: shape.num_fixed], [tokens, tokens, tokens, tokens, rows + 1, rows, rows + 1]
    )
    paged = PagedRows(
        query_starts=query_starts,
        context_lengths=context_lengths,
        page_starts=page_starts,
        pages=buffer[shape.num_fixed :],
        max_queries=shape.max_queries,
        counters=frame.counters,
    )
    plans = {window: DevicePlan(paged, frame.page_size, window) for window in frame.windows}
    return DeviceBatch(token_ids, positions, slots, dict(plans), logit_indices[:num_logits])
