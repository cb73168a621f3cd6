"""PyTorch reference of ``draft_advance``; runs on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.kernels.draft_sampling.layout import Column, Method
from outrider.randomness.streams import Stream

if TYPE_CHECKING:
    from outrider.kernels.draft_advance.layout import LoopState


def advance(state: LoopState, page_size: int) -> None:
    """See the contract."""
    left, position = state.parameters[:, Column.LENGTH], state.context_lengths.clone()
    goes_on = left > 1
    place = torch.where(goes_on, state.page_starts[:-1] + position // page_size, 0)
    slot = state.pages[place.long()] * page_size + position % page_size if len(state.pages) else position
    state.positions.copy_(torch.where(goes_on, position, state.positions))
    state.slots.copy_(torch.where(goes_on, slot, -1))
    state.context_lengths.copy_(torch.where(goes_on, position + 1, state.context_lengths))
    state.parameters[:, Column.POSITION] += goes_on.to(torch.int32)
    state.parameters[:, Column.LENGTH] -= 1
    guessed = state.parameters[:, Column.NEXT_BASE] > 0
    after = {Column.METHOD: int(Method.SPARSE), Column.STREAM: int(Stream.PROPOSAL)}
    for column, value in after.items():
        state.parameters[:, column] = torch.where(guessed, value, state.parameters[:, column])
    state.parameters[:, Column.BASE] = torch.where(
        guessed, state.parameters[:, Column.NEXT_BASE], state.parameters[:, Column.BASE]
    )
    state.parameters[:, Column.NEXT_BASE] = 0
    state.step.add_(1)
