"""What a device is told to do, as plain numbers: whoever has the same weights and cache does the same with it.

Owns the layout of each kind of step. One process that runs a model alone makes steps and runs them; of several that run
it together the first makes them, and all run them. Refuses to know how steps travel and what running one takes.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.kv_cache import PageCopy, page_table_of
from outrider.model_executor.device_inputs import BatchShape, IntArray, pack
from outrider.model_executor.input_batch import ForwardBatch


class Operation(enum.IntEnum):
    """Kinds of steps; the numbers stay what they are."""

    FORWARD = 1
    """Arguments: the shape's rows, tokens, queries of one row; positions that get logits. Numbers: as ``pack`` lays
    them out."""
    COPY_PAGES = 2
    """Numbers: source and destination of one page after the other."""
    CAPTURE = 3
    """Make ready for the shapes of decoding and scoring."""
    DRAFT = 4
    """Arguments: the loop's rows, steps, and tokens of a row before its first draw. Numbers: as ``pack_draft`` lays
    them out."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, with all that it needs."""

    operation: int
    arguments: tuple[int, ...]
    numbers: IntArray  # [any]


def no_numbers() -> IntArray:
    """Of a step that needs none."""
    return np.empty(0, dtype=np.int32)


def forward_step(batch: ForwardBatch, shape: BatchShape) -> Step:
    """The forward of a batch, laid out as ``shape``; its page copies are a step of their own."""
    arguments = (shape.num_rows, shape.num_tokens, shape.max_queries, len(batch.logit_indices))
    return Step(Operation.FORWARD, arguments, pack(batch, shape))


def copy_step(copies: Sequence[PageCopy]) -> Step:
    """Pages copied, every source read before any destination is written."""
    return Step(Operation.COPY_PAGES, (), np.array(copies, dtype=np.int32).ravel())


def shape_of(step: Step) -> tuple[BatchShape, int]:
    """The shape of a forward's step and the number of positions that get logits."""
    num_rows, num_tokens, max_queries, num_logits = step.arguments
    return BatchShape(num_rows, num_tokens, max_queries), num_logits


def copies_of(step: Step) -> list[tuple[int, int]]:
    """The (source, destination) pairs of a page copy."""
    return [(int(source), int(destination)) for source, destination in step.numbers.reshape(-1, 2).tolist()]


def batch_of(step: Step) -> ForwardBatch:
    """The batch of a forward's step that was laid out in its own shape."""
    shape, num_logits = shape_of(step)
    tokens, rows = shape.num_tokens, shape.num_rows
    sizes = (tokens, tokens, tokens, tokens, rows + 1, rows, rows + 1, 1)
    parts = [part.tolist() for part in np.split(step.numbers, np.cumsum(sizes))]
    token_ids, positions, slots, logit_indices, query_starts, context_lengths, page_starts, _, pages = parts
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        page_tables=[page_table_of(pages[start:stop]) for start, stop in itertools.pairwise(page_starts)],
        query_starts=query_starts,
        context_lengths=context_lengths,
        logit_indices=logit_indices[:num_logits],
        page_copies=(),
    )
