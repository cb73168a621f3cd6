"""State of a draft loop's rows, and the PyTorch reference of ``draft_advance``, which runs on every device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.draft_sampling.layout import DrawColumn, Method
from outrider.randomness.streams import Stream


@dataclass(frozen=True, slots=True)
class LoopState:
    """State of R rows before and after a step."""

    step: torch.Tensor  # [1] int32
    positions: torch.Tensor  # [R] int32
    slots: torch.Tensor  # [R] int32
    context_lengths: torch.Tensor  # [R] int32
    parameters: torch.Tensor  # [R, NUM_COLUMNS] int32
    page_starts: torch.Tensor  # [R+1] int32, into pages
    pages: torch.Tensor  # [any] int32


def advance(state: LoopState, page_size: int) -> None:
    """See the contract."""
    left, position = state.parameters[:, DrawColumn.LENGTH], state.context_lengths.clone()
    goes_on = left > 1
    place = torch.where(goes_on, state.page_starts[:-1] + position // page_size, 0)
    slot = state.pages[place.long()] * page_size + position % page_size if len(state.pages) else position
    state.positions.copy_(torch.where(goes_on, position, state.positions))
    state.slots.copy_(torch.where(goes_on, slot, -1))
    state.context_lengths.copy_(torch.where(goes_on, position + 1, state.context_lengths))
    state.parameters[:, DrawColumn.POSITION] += goes_on.to(torch.int32)
    state.parameters[:, DrawColumn.LENGTH] -= 1
    guessed = state.parameters[:, DrawColumn.NEXT_BASE] > 0
    after = {DrawColumn.METHOD: int(Method.SPARSE), DrawColumn.STREAM: int(Stream.PROPOSAL)}
    for column, value in after.items():
        state.parameters[:, column] = torch.where(guessed, value, state.parameters[:, column])
    state.parameters[:, DrawColumn.BASE] = torch.where(
        guessed, state.parameters[:, DrawColumn.NEXT_BASE], state.parameters[:, DrawColumn.BASE]
    )
    state.parameters[:, DrawColumn.NEXT_BASE] = 0
    state.step.add_(1)
