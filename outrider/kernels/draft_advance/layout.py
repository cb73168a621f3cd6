"""Tensors of a draft loop's rows, which every step changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a step of R rows reads, and the next one reads changed."""

    step: torch.Tensor  # [1] int32
    positions: torch.Tensor  # [R] int32
    slots: torch.Tensor  # [R] int32
    context_lengths: torch.Tensor  # [R] int32
    parameters: torch.Tensor  # [R, NUM_COLUMNS] int32
    page_starts: torch.Tensor  # [R+1] int32, into pages
    pages: torch.Tensor  # [any] int32
