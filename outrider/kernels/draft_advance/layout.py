"""Tensors of the rows of a draft loop, which every step changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
