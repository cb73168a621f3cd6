"""A draft loop laid out as one row of numbers.

Owns the layout: what the first step reads, and the state that each step leaves to the next. A plan may be laid out
larger than it is: rows added have no queries and draw nothing. Where more is appended before the first draw than one
token, that step reads tokens of its own; the others read one token of each row. Refuses to know models.

Shape letters: ``R`` rows of the shape, ``B`` rows of the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.draft_advance import LoopState
from outrider.kernels.draft_sampling.layout import NUM_COLUMNS
from outrider.kernels.paged_attention import PagedRows
from outrider.kv_cache import KVCacheManager, PageCopy, PageTable
from outrider.model_executor.device_inputs import BatchFrame, IntArray, join_padded
from outrider.model_executor.draft_loop.rows import MAX_CATCH_UP, DraftRow, Words
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch
from outrider.model_executor.worker_commands import Operation, WorkerCommand

_NO_SLOT = -1


@dataclass(frozen=True, slots=True, order=True)
class LoopShape:
    """Shape of a loop; any plan that is no larger fits it."""

    num_rows: int
    num_steps: int
    catch_up: int
    """The most tokens that a row appends before its first draw."""
    max_catch_up: int = MAX_CATCH_UP
    """That any loop of this layout may have."""

    @property
    def sizes(self) -> list[int]:
        """Size of each part of the buffer in numbers, before the pages; independent of the number of steps and of
        ``catch_up``.
        """
        rows, tokens = self.num_rows, self.num_rows * self.max_catch_up
        first = [tokens, tokens, tokens, rows + 1, rows]
        state = [1, rows, rows, rows, rows, rows * NUM_COLUMNS]
        return [*first, *state, rows + 1, rows + 1]

    @property
    def num_fixed(self) -> int:
        """Numbers before the pages."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One loop, before it is laid out."""

    token_ids: list[Sequence[int]]  # [B] each row's, before its first draw
    positions: list[int]  # [B] of the first of them
    slots: list[Sequence[int]]  # [B] of all that is appended, drawn tokens included
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
    token_ids: list[int] = []  # of the first step, as the next two
    positions: list[int] = []
    slots: list[int] = []
    last_ids: list[int] = []  # [B] of each row's last token, as the next three
    last_slots: list[int] = []
    indices: list[int] = []
    contexts: list[int] = []
    token_starts, page_starts = [0], [0]
    for start, ids, own, pages in zip(plan.positions, plan.token_ids, plan.slots, plan.page_tables, strict=True):
        count = len(ids)
        token_ids += ids
        positions += range(start, start + count)
        slots += own[:count]
        token_starts.append(len(token_ids))
        page_starts.append(page_starts[-1] + len(pages))
        last_ids.append(ids[-1])
        last_slots.append(own[count - 1])
        indices.append(len(token_ids) - 1)
        contexts.append(start + count)
    num_rows, rows, tokens = len(contexts), shape.num_rows, shape.num_rows * shape.max_catch_up
    parts = (
        (token_ids, tokens, 0),
        (positions, tokens, 0),
        (slots, tokens, _NO_SLOT),
        (token_starts, rows + 1, len(token_ids)),
        (indices, rows, 0),
        ((0,), 1, 0),
        (last_ids, rows, 0),
        ([context - 1 for context in contexts], rows, 0),
        (last_slots, rows, _NO_SLOT),
        (contexts, rows, 0),
        (array("i", b"".join(plan.parameters)), rows * NUM_COLUMNS, 0),
        (range(num_rows + 1), rows + 1, num_rows),
        (page_starts, rows + 1, page_starts[-1]),
    )
    return join_padded(parts, plan.page_tables)


def draft_command(plan: DraftPlan, shape: LoopShape) -> WorkerCommand:
    """The loop of a plan, laid out as ``shape``; its page copies are a step of their own."""
    arguments = (shape.num_rows, shape.num_steps, shape.catch_up, shape.max_catch_up)
    return WorkerCommand(Operation.DRAFT, arguments, pack_draft(plan, shape))


def loop_of(command: WorkerCommand) -> LoopShape:
    """The shape of a loop's step."""
    return LoopShape(*command.arguments)


@dataclass(frozen=True, slots=True)
class DeviceLoop:
    """A loop's inputs on the device."""

    first: Mapping[int, DeviceBatch]
    """Of a first step in which rows append several tokens, by how many they may be."""
    single: DeviceBatch
    """Of every other step: each row's one token is what was drawn in the step before."""
    state: LoopState

    @property
    def next_ids(self) -> torch.Tensor:  # [R]
        """Tokens of a step, which the next step reads."""
        return self.single.token_ids


def unpack_draft(
    buffer: torch.Tensor, shape: LoopShape, frame: BatchFrame, catch_ups: Sequence[int] = (MAX_CATCH_UP,)
) -> DeviceLoop:
    """Views of a buffer on the device that holds, or will hold, what ``pack_draft`` gave, with first steps of these
    ``catch_ups``.
    """
    parts = torch.split(buffer[: shape.num_fixed], shape.sizes)
    first_ids, first_positions, first_slots, first_starts, logit_indices = parts[:5]
    step, token_ids, positions, slots, contexts, parameters = parts[5:11]
    starts, page_starts = parts[11:]
    pages = buffer[shape.num_fixed :]

    def groups(own_slots: torch.Tensor, query_starts: torch.Tensor, max_queries: int) -> tuple[AttentionInputs, ...]:
        rows = PagedRows(query_starts, contexts, page_starts, pages, max_queries, frame.counters)
        return frame.attention_inputs(own_slots, rows)

    def first(catch_up: int) -> DeviceBatch:
        ids, own_positions, own_slots = (
            part[: shape.num_rows * catch_up] for part in (first_ids, first_positions, first_slots)
        )
        return DeviceBatch(ids, own_positions, groups(own_slots, first_starts, catch_up), logit_indices)

    firsts = {catch_up: first(catch_up) for catch_up in catch_ups}
    single = DeviceBatch(token_ids, positions, groups(slots, starts, 1), starts[:-1])
    table = parameters.view(shape.num_rows, NUM_COLUMNS)
    return DeviceLoop(firsts, single, LoopState(step, positions, slots, contexts, table, page_starts, pages))
