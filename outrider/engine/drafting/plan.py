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
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.device_inputs import BatchFrame, IntArray, join_padded
from outrider.engine.drafting.rows import DraftRow, Words
from outrider.engine.kernels.draft_sampling.layout import NUM_COLUMNS
from outrider.engine.kernels.paged_attention import DevicePlan, PagedRows
from outrider.engine.models.decoder import DeviceBatch
from outrider.engine.steps import Operation, Step
from outrider.kv_cache import KVCacheManager, PageCopy, PageTable

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
        starts, columns = [rows + 1] * 3, [rows, rows, more, more, more]
        return [tokens, tokens, tokens, *starts, *columns, rows * NUM_COLUMNS]

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
    page_tables: list[PageTable]  # [B][P] of all that is appended
    parameters: list[Words]  # [B, NUM_COLUMNS]
    num_steps: int
    page_copies: tuple[PageCopy, ...]
    """Done before anything else: all sources are read before any destination is written."""

    @property
    def shape(self) -> LoopShape:
        """The plan's own."""
        return LoopShape(len(self.token_ids), self.num_steps, max(map(len, self.token_ids)))


def plan_draft(table: KVCacheManager, rows: Sequence[DraftRow]) -> DraftPlan:
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
    token_ids: list[int] = []  # of the first forward, as the next two
    positions: list[int] = []
    slots: list[int] = []
    token_starts, page_starts = [0], [0]
    columns: list[Sequence[int]] = []  # [R] what each row has one of
    for start, ids, own, pages in zip(plan.positions, plan.token_ids, plan.slots, plan.page_tables, strict=True):
        context = start + len(ids)
        token_ids += ids
        positions += range(start, context)
        slots += own[: len(ids)]
        token_starts.append(len(token_ids))
        page_starts.append(page_starts[-1] + len(pages))
        columns.append((len(token_ids) - 1, context, *_later_steps(context, own[len(ids) :], shape.num_steps - 1)))
    num_rows = len(columns)
    columns += [(0, 0, *_no_steps(shape.num_steps - 1))] * (shape.num_rows - num_rows)
    parts = (
        (token_ids, shape.num_tokens, 0),
        (positions, shape.num_tokens, 0),
        (slots, shape.num_tokens, _NO_SLOT),
        (token_starts, shape.num_rows + 1, len(token_ids)),
        (range(num_rows + 1), shape.num_rows + 1, num_rows),
        (page_starts, shape.num_rows + 1, page_starts[-1]),
        (list(itertools.chain.from_iterable(zip(*columns, strict=True))), shape.num_rows * len(columns[0]), 0),
    )
    no_parameters = array("i", [0]) * (NUM_COLUMNS * (shape.num_rows - num_rows))
    return join_padded(parts, [*plan.parameters, no_parameters, *plan.page_tables])


def _later_steps(position: int, slots: Sequence[int], num_steps: int) -> list[int]:
    """One row's positions, slots and context lengths [3 (K-1)] in the forwards after the first, one token in each.

    A row that is done stays at its last token and stores nothing.
    """
    end, num_idle = position + len(slots), num_steps - len(slots)
    return [
        *range(position, end), *[end - 1] * num_idle,
        *slots, *[_NO_SLOT] * num_idle,
        *range(position + 1, end + 1), *[end] * num_idle,
    ]  # fmt: skip


def _no_steps(num_steps: int) -> list[int]:
    """The same of a row that was added."""
    return [*[0] * num_steps, *[_NO_SLOT] * num_steps, *[0] * num_steps]


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
    token_ids, positions, slots, query_starts, single_starts, page_starts, logit_indices, contexts = parts[:8]
    more_positions, more_slots, more_contexts = (part.view(-1, shape.num_rows) for part in parts[8:11])
    parameters = parts[11]

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
