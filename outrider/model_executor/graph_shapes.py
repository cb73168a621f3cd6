"""Shapes for which forwards and draft steps are captured as CUDA graphs.

Owns the list: total tokens in fine steps, for each class of queries a row that attention distinguishes, within the
limits of the settings. A captured forward holds any batch that is no larger; attention finds the rows that are present
by itself, so that no list of rows is needed, but for the shapes that are asked for most.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.kernels.paged_attention.device_plan import MAX_DECODE_QUERIES
from outrider.model_executor.device_inputs import BatchShape

FEW_QUERIES = 8
"""Queries of a row up to which decode attention takes its small tile."""
_EXACT_ROWS = (1, 2, 4, 8, 16, 32, 64)
_EXACT_QUERIES = (2, 3, 4, 5, 8, 9)
"""Rows by queries a row that are asked for most: in shapes of their own no token and few programs go without work."""
_CHUNK_STEP = 32
"""Tokens between the sizes of forwards with a prompt's chunk."""
_STEPS = ((8, 64), (16, 256), (32, 512), (64, 1024))
"""(step, up to): between captured sizes; products of more tokens are computed in tiles of 64 and more."""
_LAST_STEP = 128
"""Step between captured sizes past those of ``_STEPS``."""
_MOST_ROWS_OF_TILES, _MOST_TOKENS_OF_TILES = 64, 512
"""Largest batches of prompts and chunks for which attention has a program for each tile that any row might have."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Limits of what is captured."""

    max_sequences: int = 256
    """Sequences of a forward, or of a draft loop."""
    max_draft_length: int = 16
    """Draft tokens of a sequence; one more are scored together."""
    max_tokens: int = 1024
    """Tokens of a forward that is captured."""
    max_batched_tokens: int | None = None
    """Tokens of any forward; None: as many as are captured."""
    memory_bytes: int | None = None
    """Device memory of all graphs; None: a share of the device's. 0: nothing is captured."""
    capture_seconds: float | None = None
    """Time for the capture of all graphs, about; None: any time."""
    decodes: bool = True
    """True if forwards decode and score tokens; False: only draft loops do."""

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest forward."""
        return self.max_tokens if self.max_batched_tokens is None else self.max_batched_tokens


DEFAULT_LIMITS = GraphLimits()


@functools.cache
def padded_sizes(most: int) -> tuple[int, ...]:
    """Captured sizes up to ``most``, which is one of them: 1, 2, 4, 8, then in steps that grow with the size."""
    return tuple(sorted({*_sizes(most), most})) if most > 0 else ()


def padded_size(size: int, most: int) -> int:
    """The least captured size that holds ``size``; ``size`` itself beyond ``most``."""
    return next((padded for padded in padded_sizes(most) if padded >= size), size)


def forward_shapes(limits: GraphLimits, *, has_chunks: bool) -> tuple[BatchShape, ...]:
    """All of decoding, of scoring drafts, and of prompts and chunks beside these; largest first, so that smaller ones
    find memory to reuse. ``has_chunks``: attention of chunks finds the rows' tiles by itself.
    """
    decoding = [*_decoding(limits), *_scoring(limits)] if limits.decodes else []
    return _largest_first([*decoding, *_with_chunks(limits, has_chunks=has_chunks)])


def choose_shape(shape: BatchShape, shapes: tuple[BatchShape, ...]) -> BatchShape | None:
    """The one that holds ``shape`` and wastes least: attention for fewest queries a row, then fewest tokens, then rows.
    None: none does.
    """
    fitting = [candidate for candidate in shapes if candidate.holds(shape)]
    return min(fitting, key=lambda found: (found.max_queries, found.num_tokens, found.num_rows), default=None)


def _decoding(limits: GraphLimits) -> Iterator[BatchShape]:
    for size in padded_sizes(min(limits.max_sequences, limits.max_tokens)):
        yield BatchShape(size, size, 1)


def _scoring(limits: GraphLimits) -> Iterator[BatchShape]:
    """Drafts of few tokens, and of as many as there may be."""
    most_queries = limits.max_draft_length + 1
    sizes = padded_sizes(min(limits.max_tokens, limits.max_sequences * most_queries))
    if most_queries > 1:
        yield from (_shape(size, FEW_QUERIES, limits) for size in sizes if size > 1)
        yield from _exact(limits)
    if most_queries > FEW_QUERIES:
        most = min(most_queries, MAX_DECODE_QUERIES)
        yield from (_shape(size, most, limits) for size in _coarse(sizes) if size > FEW_QUERIES)


def _exact(limits: GraphLimits) -> Iterator[BatchShape]:
    """Shapes of rows that all score about as many tokens."""
    for rows, queries in itertools.product(_EXACT_ROWS, _EXACT_QUERIES):
        tokens = rows * queries
        if rows <= limits.max_sequences and queries <= limits.max_draft_length + 1 and tokens <= limits.max_tokens:
            most = FEW_QUERIES if queries <= FEW_QUERIES else limits.max_draft_length + 1
            yield BatchShape(rows, tokens, min(most, MAX_DECODE_QUERIES, tokens))


def _with_chunks(limits: GraphLimits, *, has_chunks: bool) -> Iterator[BatchShape]:
    """Prompts and chunks, of any number of queries a row."""
    most_rows = limits.max_sequences if has_chunks else min(limits.max_sequences, _MOST_ROWS_OF_TILES)
    most_tokens = limits.max_tokens if has_chunks else min(limits.max_tokens, _MOST_TOKENS_OF_TILES)
    for size in padded_sizes(most_tokens):
        if size > MAX_DECODE_QUERIES and (size % _CHUNK_STEP == 0 or size == most_tokens):
            yield BatchShape(min(size, most_rows), size, size)


def _shape(num_tokens: int, max_queries: int, limits: GraphLimits) -> BatchShape:
    return BatchShape(min(num_tokens, limits.max_sequences), num_tokens, min(max_queries, num_tokens))


def _coarse(sizes: tuple[int, ...]) -> Iterator[int]:
    """Every other of the larger ones: long drafts of many sequences at once are rare."""
    small = [size for size in sizes if size <= 2 * FEW_QUERIES]
    larger = sizes[len(small) :]
    yield from (*small, *larger[:-1:2], *larger[-1:])


def _sizes(most: int) -> Iterator[int]:
    yield from (size for size in (1, 2, 4) if size < most)
    size = 0
    while True:
        size += next((step for step, until in _STEPS if size < until), _LAST_STEP)
        if size >= most:
            return
        yield size


def _largest_first(shapes: list[BatchShape]) -> tuple[BatchShape, ...]:
    return tuple(sorted(set(shapes), key=lambda shape: (shape.num_tokens, shape.max_queries), reverse=True))
