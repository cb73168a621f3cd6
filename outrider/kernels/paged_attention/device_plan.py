"""Attention plan on a GPU: arrays on the device, shared by all layers.

Nothing is computed per row on the host: kernels find the place of each row themselves, so one captured graph serves
every batch of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.launching import shared_bytes

MAX_DECODE_QUERIES = 17
"""Queries of a row up to which a batch counts as decoding; rows of more are prompts, or their chunks."""
NUM_SCHEDULE_FIELDS = 8
_PROGRAMS_PER_PROCESSOR, _MOST_PROGRAMS_PER_PROCESSOR = 2, 4
_WIDEST_CHUNK_HEAD, _CHUNK_BYTES = 128, 227 << 10
"""Limits of ``chunks``: head size, and shared memory of a program on a GPU of capability 9.0; large tiles take nearly
all."""
_WIDE_HEAD = 256
"""Heads that are larger leave shared memory for few keys at once."""
_FEWEST_ROWS, _MOST_ROWS = 16, 64
"""Bounds on the rows of a tile."""
_MANY_ROWS = 32
"""Up to this many, programs of one query a row are too few to hide the time until their first keys are there."""
_UNEVEN_ROWS = range(_MANY_ROWS + 1, 65)
"""Numbers of rows, one query each, that give some multiprocessors a program more unless shares are half as long."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Location of one row's queries and pages, known on the host."""

    first_query: int
    num_queries: int
    context: int
    """Tokens, the queries' own included."""
    first_page: int


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Up to B rows; rows that are present come first, the others have no queries."""

    query_starts: torch.Tensor  # [B+1] int32
    context_lengths: torch.Tensor  # [B] int32
    page_starts: torch.Tensor  # [B+1] int32, into pages
    pages: torch.Tensor  # [any] int32, the pages of one row after the other
    max_queries: int
    """No row has more."""
    counters: torch.Tensor
    """int32, zero between launches, one for each tile whose keys are cut into parts; see ``num_counters``."""
    spans: tuple[RowSpan, ...] = ()
    """Spans of all rows, in a forward that is launched without a graph; else empty."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The rows of one forward with one window size."""

    rows: PagedRows
    page_size: int
    window: int | None
    num_sinks: int = 0
    """First tokens of a context that are seen besides the window."""
    batch_invariant: bool = False
    """True if outputs must not depend on the batch: ``invariant`` then computes all rows."""
    schedule: torch.Tensor | None = None  # [fields, P] int32
    """Schedule of a decoding batch of several rows, or of any batch-invariant one, made in the forward: see
    ``prepare_plan``."""


def can_take_chunks(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """True if the kernel for prompts and chunks supports these types and heads, and fits the device."""
    return dtype.itemsize == 2 and head_dim <= _WIDEST_CHUNK_HEAD and shared_bytes(device) >= _CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Tile sizes of a launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KeySharing:
    """Distribution of the keys of a decoding batch over programs."""

    tiling: AttentionTiling
    budget: int
    """Parts, for each KV head, of about equal length."""
    num_parts: int
    """Bound on the parts of each KV head, tiles that are left whole included."""

    @property
    def num_slots(self) -> int:
        """Parts of cut tiles that there can be, for each KV head. A tile is cut from one and a half shares on: into a
        third more parts than it has shares, at most.
        """
        return self.budget + self.budget // 3 + 1


def share_keys(
    rows: PagedRows,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_processors: int,
    tiling: AttentionTiling | None = None,
    budget: int | None = None,
) -> KeySharing:
    """Plan for any batch of ``rows``; ``tiling`` and ``budget`` are chosen unless they are given."""
    group, num_rows = num_heads // num_kv_heads, rows.context_lengths.shape[0]
    folded = rows.max_queries * group
    tiling = tiling or choose_tiling(folded, num_rows, head_dim, dtype)
    is_uneven = tiling.block_m == _FEWEST_ROWS and num_rows in _UNEVEN_ROWS
    programs = _MOST_PROGRAMS_PER_PROCESSOR if is_uneven else _PROGRAMS_PER_PROCESSOR
    budget = budget or max(1, programs * num_processors // num_kv_heads)
    tiles_of_row = -(-folded // tiling.block_m)
    num_tiles = min(num_rows * tiles_of_row, num_tokens * group // tiling.block_m + num_rows)
    return KeySharing(tiling, budget, budget + budget // 3 + 1 + num_tiles)


def choose_tiling(folded: int, num_rows: int, head_dim: int, dtype: torch.dtype) -> AttentionTiling:
    """``folded`` are the queries of the largest row times the heads of a group. Found best by trying on an H200."""
    block_m = _FEWEST_ROWS
    while block_m < min(folded, _MOST_ROWS):
        block_m *= 2
    if head_dim > _WIDE_HEAD:
        return AttentionTiling(min(block_m, 32), 64 // dtype.itemsize, 4, 2)
    if dtype == torch.float32:
        return AttentionTiling(min(block_m, 32), 32, 4, 2)
    if num_rows == 1 and block_m < _MOST_ROWS:
        # Two stages leave shared memory to the product behind it: a drafted token of a 1B takes 0.06 ms less.
        return AttentionTiling(block_m, 128, 4, 2)
    if block_m > _FEWEST_ROWS:
        return AttentionTiling(block_m, 64, 4, 3)
    # Deep where few programs share a processor, and many of them where there are enough.
    return AttentionTiling(block_m, 64, 4, 4 if num_rows <= _MANY_ROWS else 2)


def num_counters(num_processors: int) -> int:
    """Counters that suffice for every launch: tiles are cut only while there are few."""
    return _MOST_PROGRAMS_PER_PROCESSOR * num_processors
