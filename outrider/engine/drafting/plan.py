"""A draft loop laid out as one row of numbers.

Owns the layout. What each step reads of positions, slots and lengths is known before the first token is drawn, because
every draw appends one token: all of it is worked out here, and only the tokens themselves pass from step to step on the
device. A plan may be laid out larger than it is: rows added have no queries and draw nothing, and what a row does after
its last token has slot -1. Refuses to know models.

Shape letters: ``R`` rows of the shape, ``K`` its steps, ``B`` rows of the plan.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from outrider.engine.device_inputs import BatchFrame, IntArray, join_padded, starts_of
from outrider.engine.drafting.rows import DraftRow, Words
from outrider.engine.kernels.draft_sampling.layout import NUM_COLUMNS
from outrider.engine.kernels.paged_attention import DevicePlan, PagedRows
from outrider.engine.models.decoder import DeviceBatch
from outrider.engine.sequences import PageCopy, Pages, SequenceTable
from outrider.engine.steps import Operation, Step

_NO_SLOT = -1


@dataclass(frozen=True, slots=True, order=True)
class LoopShape:
    """What a launch is made for; any plan that is no larger fits it."""

    num_rows: int
    num_steps: int
    catch_up: int
    """The most tokens that a row appends before its first draw."""

    @property
    def num_tokens(self) -> int:
        """Of the first forward, which brings the rows up to date."""
        return self.num_rows * self.catch_up

    @property
    def sizes(self) -> list[int]:
        """How many numbers each part of the buffer has; the pages come after them."""
        rows, tokens, more = self.num_rows, self.num_tokens, (self.num_steps - 1) * self.num_rows
        first = [tokens, tokens, tokens, rows, rows + 1, rows]
        return [*first, more, more, more, rows + 1, rows + 1, rows * NUM_COLUMNS]

    @property
    def num_fixed(self) -> int:
        """Numbers before the pages."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One launch, before it is laid out."""

    token_ids: list[Sequence[int]]  # [B] each row's, before its first draw
    positions: list[int]  # [B] of the first of them
    slots: list[list[int]]  # [B] of all that is appended, drawn tokens included
    page_tables: list[Pages]  # [B][P] of all that is appended
    parameters: list[Words]  # [B, NUM_COLUMNS]
    num_steps: int
    page_copies: tuple[PageCopy, ...]
    """Done before anything else: all sources are read before any destination is written."""

    @property
    def shape(self) -> LoopShape:
        """The plan's own."""
        return LoopShape(len(self.token_ids), self.num_steps, max(map(len, self.token_ids)))


def plan_draft(table: SequenceTable, rows: Sequence[DraftRow]) -> DraftPlan:
    """Extend every row's sequence, for which there is room, by what will be appended, as yet without the ids of what
    will be drawn.
    """
    parameters = [row.words() for row in rows]
    positions = [row.sequence.length for row in rows]
    slots = [table.extend_checked(row.sequence, [*row.token_ids, *[0] * (row.num_drafts - 1)]) for row in rows]
    return DraftPlan(
        token_ids=[row.token_ids for row in rows],
        positions=positions,
        slots=slots,
        page_tables=[table.pages_of(row.sequence) for row in rows],
        parameters=parameters,
        num_steps=max(row.num_drafts for row in rows),
        page_copies=tuple(table.pending_copies()),
    )


def pack_draft(plan: DraftPlan, shape: LoopShape) -> IntArray:
    """The plan in one array, laid out as ``shape``."""
    counts = [len(ids) for ids in plan.token_ids]
    ends = list(itertools.accumulate(counts))
    contexts = [start + count for start, count in zip(plan.positions, counts, strict=True)]
    first_slots = (own[:count] for own, count in zip(plan.slots, counts, strict=True))
    page_starts = starts_of(plan.page_tables)
    parts = (
        (_joined(plan.token_ids), 0),
        (_joined(map(range, plan.positions, contexts)), 0),
        (_joined(first_slots), _NO_SLOT),
        ([end - 1 for end in ends], 0),
        ([0, *ends], ends[-1]),
        (contexts, 0),
        *((part, 0) for part in _later_steps(plan, shape, contexts)),
        (range(len(counts) + 1), len(counts)),
        (page_starts, page_starts[-1]),
    )
    padded = ((values, size, filler) for (values, filler), size in zip(parts, shape.sizes[:-1], strict=True))
    no_rows = array("i", [0]) * (NUM_COLUMNS * (shape.num_rows - len(counts)))
    return join_padded(padded, [*plan.parameters, no_rows, *plan.page_tables])


def _later_steps(plan: DraftPlan, shape: LoopShape, contexts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Positions, slots and context lengths [(K-1) R] of the forwards after the first, one token a row, step by step.

    A row that is done stays at its last token and stores nothing.
    """
    num_later = shape.num_steps - 1
    positions: list[Sequence[int]] = []  # [B][K-1], as the others
    slots: list[Sequence[int]] = []
    lengths: list[Sequence[int]] = []
    for first, ids, own in zip(contexts, plan.token_ids, plan.slots, strict=True):
        later = own[len(ids) :]
        end, num_idle = first + len(later), num_later - len(later)
        positions.append(_held(range(first, end), end - 1, num_idle))
        slots.append(_held(later, _NO_SLOT, num_idle))
        lengths.append(_held(range(first + 1, end + 1), end, num_idle))
    idle, num_added = (0,) * num_later, shape.num_rows - len(contexts)
    positions += [idle] * num_added
    slots += [(_NO_SLOT,) * num_later] * num_added
    lengths += [idle] * num_added
    return _by_step(positions), _by_step(slots), _by_step(lengths)


def _held(numbers: Sequence[int], last: int, count: int) -> Sequence[int]:
    """The numbers, and ``last`` so many times."""
    return [*numbers, *[last] * count] if count else numbers


def _by_step(rows: Sequence[Sequence[int]]) -> list[int]:  # [R][K-1] -> [(K-1) R]
    return _joined(zip(*rows, strict=True))


def _joined(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def draft_step(plan: DraftPlan, shape: LoopShape) -> Step:
    """The loop of a plan, laid out as ``shape``; its page copies are a step of their own."""
    return Step(Operation.DRAFT, (shape.num_rows, shape.num_steps, shape.catch_up), pack_draft(plan, shape))


def loop_of(step: Step) -> LoopShape:
    """The shape of a loop's step."""
    return LoopShape(*step.arguments)


@dataclass(frozen=True, slots=True)
class DeviceLoop:
    """A launch's inputs on the device."""

    first: DeviceBatch
    later: tuple[DeviceBatch, ...]  # K-1; their tokens are what was drawn in the step before
    parameters: torch.Tensor  # [R, NUM_COLUMNS]


def unpack_draft(
    buffer: torch.Tensor,
    shape: LoopShape,
    frame: BatchFrame,
    next_ids: torch.Tensor,  # [K, R] int32
) -> DeviceLoop:
    """Views of a buffer on the device that holds, or will hold, what ``pack_draft`` gave."""
    parts = torch.split(buffer[: shape.num_fixed], shape.sizes)
    token_ids, positions, slots, logit_indices, query_starts, contexts = parts[:6]
    more_positions, more_slots, more_contexts = (part.view(-1, shape.num_rows) for part in parts[6:9])
    single_starts, page_starts, parameters = parts[9:]

    def plans(starts: torch.Tensor, lengths: torch.Tensor, max_queries: int) -> dict[int | None, DevicePlan]:
        pages = buffer[shape.num_fixed :]
        rows = PagedRows(starts, lengths, page_starts, pages, max_queries, frame.counters)
        return {window: DevicePlan(rows, frame.page_size, window) for window in frame.windows}

    first = DeviceBatch(token_ids, positions, slots, dict(plans(query_starts, contexts, shape.catch_up)), logit_indices)
    later = tuple(
        DeviceBatch(
            next_ids[step], more_positions[step], more_slots[step],
            dict(plans(single_starts, more_contexts[step], 1)), single_starts[:-1],
        )
        for step in range(shape.num_steps - 1)
    )  # fmt: skip
    return DeviceLoop(first, later, parameters.view(shape.num_rows, NUM_COLUMNS))
