"""A batch as the GPU's ``paged_attention`` reads it: arrays on the device, alike for all layers.

Nothing here is worked out row by row; a kernel finds each row's place itself, so that one captured launch serves every
batch of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.engine.kernels.launching import shared_bytes

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
    num_rows: torch.Tensor  # [1] int32: rows that are present
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


def split_budget(num_kv_heads: int, num_processors: int) -> int:
    """Parts, for each KV head, into which all tiles of queries together are cut, so that small batches fill the
    device.
    """
    return max(1, _PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)


def num_counters(num_processors: int) -> int:
    """Counters that suffice for every launch: contexts are cut only while there are few groups."""
    return _PROGRAMS_PER_PROCESSOR * num_processors
