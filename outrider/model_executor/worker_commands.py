"""Worker commands: what the ranks of a model are told to run, as plain numbers.

Rank 0 makes a command, and every rank runs it over its own part of weights and cache. How commands travel is
``distributed``'s, and running them the ``Worker``'s.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.kv_cache import PageCopy, WindowPages, page_table_of
from outrider.kv_cache.state_slots import NUM_COLUMNS, SlotCopy
from outrider.model_executor.device_inputs import BatchShape, IntArray
from outrider.model_executor.input_batch import ForwardBatch
from outrider.model_executor.row_batch import BatchLayout

_FORWARD_ARGUMENTS = 4
"""Number of arguments of every forward; layers come after them."""


class Operation(enum.IntEnum):
    """Kinds of commands; their numbers are part of what ranks send each other."""

    FORWARD = 1
    """Arguments: the shape's rows, tokens, queries of one row; positions that get logits; the layers whose hidden
    states are wanted. Numbers: as ``pack`` lays them out."""
    COPY_PAGES = 2
    """Numbers: source and destination of one page after the other."""
    CAPTURE = 3
    """Make ready for the shapes of decoding and scoring."""
    DRAFT = 4
    """Arguments: the loop's rows, steps, tokens of a row before its first draw, and the most of them that the layout
    has room for. Numbers: as ``pack_draft`` lays them out."""
    FORWARD_DRAWN = 5
    """A ``FORWARD`` of one token a row, of which each gets logits, and which only the device of rank 0 knows."""
    COPY_STATES = 6
    """Numbers: source and destination of one slot of recurrent layers after the other."""
    MAP_WINDOW_PAGES = 7
    """Numbers: page and window page of one after the other."""
    COPY_WINDOW_PAGES = 8
    """Numbers: source and destination of one window page after the other."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """One launch, with all that it needs."""

    operation: int
    arguments: tuple[int, ...]
    numbers: IntArray  # [any]


def capture_command() -> WorkerCommand:
    """Capture CUDA graphs."""
    return WorkerCommand(Operation.CAPTURE, (), no_numbers())


def no_numbers() -> IntArray:
    """Numbers of a command that needs none."""
    return np.empty(0, dtype=np.int32)


def forward_command(
    batch: BatchLayout, shape: BatchShape, layers: Sequence[int] = (), *, is_drawn: bool = False
) -> WorkerCommand:
    """The forward of a batch, laid out as ``shape``; its page copies are a command of their own. ``is_drawn``: the
    tokens are placeholders, see ``Operation.FORWARD_DRAWN``.
    """
    operation = Operation.FORWARD_DRAWN if is_drawn else Operation.FORWARD
    arguments = shape.num_rows, shape.num_tokens, shape.max_queries, batch.num_logits, *layers
    return WorkerCommand(operation, arguments, batch.pack(shape))


def copy_command(copies: Sequence[PageCopy]) -> WorkerCommand:
    """Pages copied, every source read before any destination is written."""
    return WorkerCommand(Operation.COPY_PAGES, (), np.array(copies, dtype=np.int32).ravel())


def window_commands(window: WindowPages) -> Iterator[WorkerCommand]:
    """Commands for window pages that are due before a forward; mostly none."""
    for operation, pairs in (
        (Operation.COPY_WINDOW_PAGES, [(source, destination) for destination, source in window.pending_copies.items()]),
        (Operation.MAP_WINDOW_PAGES, list(window.pending_maps.items())),
    ):
        if pairs:
            yield WorkerCommand(operation, (), np.array(pairs, dtype=np.int32).ravel())


def state_copy_command(copies: Sequence[SlotCopy]) -> WorkerCommand:
    """Slots of recurrent layers copied, every source read before any destination is written."""
    return WorkerCommand(Operation.COPY_STATES, (), np.array(copies, dtype=np.int32).ravel())


def shape_of(command: WorkerCommand) -> tuple[BatchShape, int]:
    """The shape of a forward and the number of positions that get logits."""
    num_rows, num_tokens, max_queries, num_logits = command.arguments[:_FORWARD_ARGUMENTS]
    return BatchShape(num_rows, num_tokens, max_queries), num_logits


def layers_of(command: WorkerCommand) -> tuple[int, ...]:
    """The layers whose hidden states a forward is to give; mostly none."""
    return command.arguments[_FORWARD_ARGUMENTS:]


def copies_of(command: WorkerCommand) -> list[tuple[int, int]]:
    """The (source, destination) pairs of a copy of pages, window pages or slots."""
    return [(int(source), int(destination)) for source, destination in command.numbers.reshape(-1, 2).tolist()]


def batch_of(command: WorkerCommand, *, has_states: bool = False) -> ForwardBatch:
    """The batch of a forward that was laid out in its own shape; ``has_states``: of a model with recurrent layers."""
    shape, num_logits = shape_of(command)
    tokens, rows = shape.num_tokens, shape.num_rows
    sizes = (tokens, tokens, tokens, tokens, rows + 1, rows, rows + 1)
    parts = [part.tolist() for part in np.split(command.numbers, np.cumsum(sizes))]
    token_ids, positions, slots, logit_indices, query_starts, context_lengths, page_starts, pages = parts
    num_of_states = NUM_COLUMNS * rows if has_states else 0
    states = tuple(pages[start : start + rows] for start in range(0, num_of_states, rows))
    pages = pages[num_of_states:]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        page_tables=[page_table_of(pages[start:stop]) for start, stop in itertools.pairwise(page_starts)],
        query_starts=query_starts,
        context_lengths=context_lengths,
        logit_indices=logit_indices[:num_logits],
        page_copies=(),
        states=states,
    )
