"""A batch as the GPU's ``paged_attention`` reads it: arrays on the device, alike for all layers.

Nothing here is worked out row by row; a kernel finds each row's place itself, so that one captured launch serves every
batch of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.launching import shared_bytes

MAX_SPLITS = 32
MAX_DECODE_QUERIES = 17
"""Queries of a row up to which a batch counts as decoding; rows of more are prompts, or their chunks."""
_PROGRAMS_PER_PROCESSOR = 2
_WIDEST_CHUNK_HEAD, _CHUNK_BYTES = 128, 227 << 10
"""What ``chunks`` is made for: shared memory of a program on a GPU of capability 9.0; large tiles take nearly all."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Up to B rows; those present come first, and the others have no queries."""

    query_starts: torch.Tensor  # [B+1] int32
    context_lengths: torch.Tensor  # [B] int32
    page_starts: torch.Tensor  # [B+1] int32, into pages
    pages: torch.Tensor  # [any] int32, the pages of one row after the other
    num_rows: torch.Tensor | None  # [1] int32: rows that are present, where a launch is to find out; None: nearly all
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


def can_take_chunks(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether the kernel of prompts and chunks is for numbers and heads such as these, and fits the device."""
    return dtype.itemsize == 2 and head_dim <= _WIDEST_CHUNK_HEAD and shared_bytes(device) >= _CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Cut:
    """How contexts are cut into parts, so that small batches fill the device."""

    grid: tuple[int, int, int]
    finds_rows: bool
    """Whether programs find out how many rows are present."""
    num_splits: int
    """Of each context; where rows are found, of those that are present, together."""
    num_parts: int
    """That leave sums, at most."""
    is_whole: bool
    """Whether no context is cut, were all rows present."""


def choose_cut(
    rows: PagedRows,
    *,
    num_tokens: int,
    num_kv_heads: int,
    num_tiles: int,
    num_processors: int,
    splits: int | None = None,
) -> Cut:
    """For rows of ``num_tiles`` tiles; ``splits`` of each context where they are given. Rows are not found where there
    are too many to cut contexts, however few share so many tokens.
    """
    num_rows = rows.context_lengths.shape[0]
    groups = num_tiles * num_rows
    fewest_groups = -(-num_tokens // rows.max_queries) * num_kv_heads
    if rows.num_rows is None or (not splits and _choose_splits(fewest_groups, num_processors) == 1):
        splits = splits or _choose_splits(groups * num_kv_heads, num_processors)
        num_parts = groups * num_kv_heads * splits if splits > 1 else 0
        return Cut((num_tiles * splits, num_kv_heads, num_rows), False, splits, num_parts, splits == 1)
    budget = splits * groups if splits else max(1, _PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)
    num_programs = max(groups, min(budget, groups * MAX_SPLITS))
    return Cut((1, num_kv_heads, num_programs), True, budget, num_kv_heads * budget, 2 * groups > budget)


def _choose_splits(num_groups: int, num_processors: int) -> int:
    """A power of two."""
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_groups)
    splits = 1
    while splits * 2 <= min(wanted, MAX_SPLITS):
        splits *= 2
    return splits


def num_counters(num_processors: int) -> int:
    """Counters that suffice for every launch: contexts are cut only while there are few groups."""
    return _PROGRAMS_PER_PROCESSOR * num_processors
