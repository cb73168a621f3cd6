"""A batch as the GPU's ``paged_attention`` reads it: arrays on the device, alike for all layers.

Nothing here is worked out row by row; a kernel finds each row's place itself, so that one captured launch serves every
batch of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 32
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class PagedRows:
    """B rows, of which those without queries are skipped."""

    query_starts: torch.Tensor  # [B+1] int32
    context_lengths: torch.Tensor  # [B] int32
    page_starts: torch.Tensor  # [B+1] int32, into pages
    pages: torch.Tensor  # [any] int32, the pages of one row after the other
    max_queries: int
    """No row has more."""
    counters: torch.Tensor
    """int32, zero between launches, one for each group of programs that share a row; see ``num_counters``."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One forward's rows under one window size."""

    rows: PagedRows
    page_size: int
    window: int | None


def choose_splits(num_groups: int, num_processors: int) -> int:
    """Into how many parts each row's context is cut so that small batches fill the device."""
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_groups)
    splits = 1
    while splits * 2 <= min(wanted, MAX_SPLITS):
        splits *= 2
    return splits


def num_counters(num_processors: int) -> int:
    """Counters that suffice for every launch: contexts are cut only while there are few groups."""
    return _PROGRAMS_PER_PROCESSOR * num_processors
