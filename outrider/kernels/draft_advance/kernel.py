# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``draft_advance`` as one Triton kernel of one program: rows are few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.draft_sampling.layout import NUM_COLUMNS, DrawColumn, Method
from outrider.kernels.launching import launch_options
from outrider.randomness.streams import Stream

if TYPE_CHECKING:
    from outrider.kernels.draft_advance.reference import LoopState

_POSITION = tl.constexpr(int(DrawColumn.POSITION))
_LENGTH = tl.constexpr(int(DrawColumn.LENGTH))
_METHOD = tl.constexpr(int(DrawColumn.METHOD))
_STREAM = tl.constexpr(int(DrawColumn.STREAM))
_BASE = tl.constexpr(int(DrawColumn.BASE))
_NEXT_BASE = tl.constexpr(int(DrawColumn.NEXT_BASE))
_SPARSE = tl.constexpr(int(Method.SPARSE))
_PROPOSAL = tl.constexpr(int(Stream.PROPOSAL))
_COLUMNS = tl.constexpr(int(NUM_COLUMNS))
_FEWEST = 32


@triton.jit(
    # Read number by number from wherever they lie: no kernel of its own for each alignment.
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "step_ptr", "positions_ptr", "slots_ptr", "contexts_ptr", "parameters_ptr", "page_starts_ptr", "pages_ptr"
    ],
)  # fmt: skip
def _advance_kernel(
    step_ptr,  # [1]
    positions_ptr,  # [R]
    slots_ptr,  # [R]
    contexts_ptr,  # [R]
    parameters_ptr,  # [R, NUM_COLUMNS]
    page_starts_ptr,  # [R+1]
    pages_ptr,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    numbers = parameters_ptr + row * _COLUMNS
    left = tl.load(numbers + _LENGTH, mask=is_row, other=0)
    drawn_at = tl.load(numbers + _POSITION, mask=is_row, other=0)
    position = tl.load(contexts_ptr + row, mask=is_row, other=0)
    next_base = tl.load(numbers + _NEXT_BASE, mask=is_row, other=0)
    goes_on = is_row & (left > 1)
    first_page = tl.load(page_starts_ptr + row, mask=goes_on, other=0)
    page = tl.load(pages_ptr + first_page + position // PAGE_SIZE, mask=goes_on, other=0)
    slot = tl.where(goes_on, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(positions_ptr + row, position, mask=goes_on)
    tl.store(slots_ptr + row, slot, mask=is_row)
    tl.store(contexts_ptr + row, position + 1, mask=goes_on)
    tl.store(numbers + _POSITION, drawn_at + 1, mask=goes_on)
    tl.store(numbers + _LENGTH, left - 1, mask=is_row)
    tl.store(numbers + _METHOD, _SPARSE, mask=next_base > 0)
    tl.store(numbers + _STREAM, _PROPOSAL, mask=next_base > 0)
    tl.store(numbers + _BASE, next_base, mask=next_base > 0)
    tl.store(numbers + _NEXT_BASE, 0, mask=next_base > 0)
    tl.store(step_ptr, tl.load(step_ptr) + 1)


def advance(state: LoopState, page_size: int) -> None:
    """See the contract."""
    num_rows = len(state.positions)
    _advance_kernel[(1,)](
        state.step, state.positions, state.slots, state.context_lengths, state.parameters, state.page_starts,
        state.pages, num_rows,
        PAGE_SIZE=page_size, ROWS=max(_FEWEST, triton.next_power_of_2(num_rows)), **launch_options(state.step),
    )  # fmt: skip
