"""A draft loop laid out as one row of numbers.

Owns the layout: what the first step reads, and the state that each step leaves to the next. A plan may be laid out
larger than it is: rows added have no queries and draw nothing. Where more is appended before the first draw than one
token, that step reads tokens of its own; the others read one token of each row.

Shape letters: ``R`` rows of the shape, ``B`` rows of the plan, ``T`` tokens of all of them before the first draw.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.kernels.draft_advance import LoopState
from outrider.kernels.draft_sampling.layout import NUM_COLUMNS
from outrider.kernels.paged_attention import PagedRows
from outrider.kv_cache import PageCopy, PageTable, StateRows
from outrider.kv_cache.state_slots import NUM_COLUMNS as NUM_STATE_COLUMNS
from outrider.model_executor.device_inputs import BatchFrame, IntArray, starts_of
from outrider.model_executor.draft_loop.rows import MAX_UNCOMPUTED_TOKENS, Words
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch, StateInputs
from outrider.model_executor.worker_commands import Operation, WorkerCommand

_NO_SLOT = -1
"""Slot of a token whose keys and values are not stored."""


@dataclass(frozen=True, slots=True, order=True)
class LoopShape:
    """Shape of a loop; any plan that is no larger fits it."""

    num_rows: int
    num_steps: int
    num_prefill: int
    """The most tokens that a row appends before its first draw."""
    max_prefill: int = MAX_UNCOMPUTED_TOKENS
    """Largest draft prefill of any loop of this layout."""

    @property
    def sizes(self) -> list[int]:
        """Size of each part of the buffer in numbers, before the pages; independent of the number of steps and of
        ``num_prefill``.
        """
        rows, tokens = self.num_rows, self.num_rows * self.max_prefill
        first = [tokens, tokens, tokens, rows + 1, rows]
        state = [1, rows, rows, rows, rows, rows * NUM_COLUMNS]
        return [*first, *state, rows + 1, rows + 1]

    @property
    def num_fixed(self) -> int:
        """Numbers before the pages."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One loop, before it is laid out; valid until its sequences change."""

    token_ids: list[int]  # [T] of all rows before their first draw, as the next two
    positions: list[int]  # [T]
    slots: list[int]  # [T]
    ends: list[int]  # [B] where each row's tokens end
    contexts: Sequence[int]  # [B] tokens of each sequence before the first draw
    page_tables: Sequence[PageTable]  # [B][P] of all that is appended, drawn tokens included
    parameters: Words  # [B * NUM_COLUMNS]
    num_steps: int
    num_prefill: int
    """The most tokens of a row before its first draw."""
    page_copies: tuple[PageCopy, ...]
    """Done before anything else: all sources are read before any destination is written."""
    states: StateRows | None = None
    """States of models with recurrent layers."""


def pack_draft(plan: DraftPlan, shape: LoopShape) -> IntArray:
    """The plan in one array, laid out as ``shape``."""
    ids, slots, contexts, num_tokens = plan.token_ids, plan.slots, plan.contexts, len(plan.token_ids)
    last, page_starts = [end - 1 for end in plan.ends], starts_of(plan.page_tables)
    num_rows = len(contexts)
    more, rest = shape.num_rows - num_rows, shape.num_rows * shape.max_prefill - num_tokens
    numbers = array("i", [
        *ids, *[0] * rest,
        *plan.positions, *[0] * rest,
        *slots, *[_NO_SLOT] * rest,
        0, *plan.ends, *[num_tokens] * more,
        *last, *[0] * more,
        0,
        *[ids[place] for place in last], *[0] * more,
        *[context - 1 for context in contexts], *[0] * more,
        *[slots[place] for place in last], *[_NO_SLOT] * more,
        *contexts, *[0] * more,
    ])  # fmt: skip
    numbers += plan.parameters
    numbers.frombytes(bytes(more * NUM_COLUMNS * numbers.itemsize))
    starts = [*range(num_rows + 1), *[num_rows] * more, *page_starts, *[page_starts[-1]] * more]
    numbers += array("i", starts)
    if plan.states is not None:
        numbers.frombytes(plan.states.padded(shape.num_rows).tobytes())
    numbers.frombytes(b"".join(plan.page_tables))  # most of the numbers: they need no conversion
    return np.frombuffer(numbers, dtype=np.int32)


def draft_command(plan: DraftPlan, shape: LoopShape) -> WorkerCommand:
    """The loop of a plan, laid out as ``shape``; its page copies are a step of their own."""
    arguments = (shape.num_rows, shape.num_steps, shape.num_prefill, shape.max_prefill)
    return WorkerCommand(Operation.DRAFT, arguments, pack_draft(plan, shape))


def loop_of(command: WorkerCommand) -> LoopShape:
    """The shape of a loop's step."""
    return LoopShape(*command.arguments)


@dataclass(frozen=True, slots=True)
class DeviceLoop:
    """A loop's inputs on the device."""

    first: Mapping[int, DeviceBatch]
    """Batches of a first step in which rows append several tokens, by the largest number of these."""
    single: DeviceBatch
    """Batch of every other step: each row's one token was drawn in the step before."""
    state: LoopState

    @property
    def next_ids(self) -> torch.Tensor:  # [R]
        """Tokens of a step, which the next step reads."""
        return self.single.token_ids


def unpack_draft(
    buffer: torch.Tensor, shape: LoopShape, frame: BatchFrame, prefill_sizes: Sequence[int] = (MAX_UNCOMPUTED_TOKENS,)
) -> DeviceLoop:
    """Views of a buffer on the device that holds, or will hold, what ``pack_draft`` gave, with first steps of these
    ``prefill_sizes``.
    """
    parts = torch.split(buffer[: shape.num_fixed], shape.sizes)
    first_ids, first_positions, first_slots, first_starts, logit_indices = parts[:5]
    step, token_ids, positions, slots, contexts, parameters = parts[5:11]
    starts, page_starts = parts[11:]
    num_of_states = frame.num_of_states(shape.num_rows)
    of_states = buffer[shape.num_fixed : shape.num_fixed + num_of_states].view(NUM_STATE_COLUMNS, -1)
    pages = buffer[shape.num_fixed + num_of_states :]

    def groups(own_slots: torch.Tensor, query_starts: torch.Tensor, max_queries: int) -> tuple[AttentionInputs, ...]:
        rows = PagedRows(query_starts, contexts, page_starts, pages, max_queries, frame.counters)
        return frame.attention_inputs(own_slots, rows)

    def first(num_prefill: int) -> DeviceBatch:
        ids, own_positions, own_slots = (
            part[: shape.num_rows * num_prefill] for part in (first_ids, first_positions, first_slots)
        )
        states = StateInputs(num_prefill, first_starts, contexts, own_slots, *of_states) if num_of_states else None
        return DeviceBatch(ids, own_positions, groups(own_slots, first_starts, num_prefill), logit_indices, states)

    firsts = {num_prefill: first(num_prefill) for num_prefill in prefill_sizes}
    states = StateInputs(1, starts, contexts, slots, *of_states) if num_of_states else None
    single = DeviceBatch(token_ids, positions, groups(slots, starts, 1), starts[:-1], states)
    table = parameters.view(shape.num_rows, NUM_COLUMNS)
    return DeviceLoop(firsts, single, LoopState(step, positions, slots, contexts, table, page_starts, pages))
