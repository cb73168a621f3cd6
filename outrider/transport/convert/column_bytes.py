"""Columns of a message: one array for each field of many items, as little-endian bytes.

What commands and answers have in common: writing, and checks of all lengths against each other before anything is made
of the arrays. Knows no fields of either.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.errors import ProtocolError
from outrider.limits import LINK_FIELDS
from outrider.transport.convert.arrays import little_endian

SESSION_BYTES = 8


def to_bytes(code: str, values: Sequence[int]) -> bytes:
    """Numbers as ``array`` has them; ``OverflowError`` for one that does not fit."""
    return little_endian(array(code, values)).tobytes()


def array_bytes(values: NDArray[Any], dtype: DTypeLike) -> bytes:
    """An array of numbers that fit the type."""
    return values.astype(dtype, copy=False).tobytes()


def joined(rows: Sequence[NDArray[Any]], dtype: DTypeLike) -> bytes:
    """Arrays, one after the other."""
    return np.concatenate(rows).astype(dtype, copy=False).tobytes()


def from_bytes(name: str, content: bytes, dtype: DTypeLike, count: int | None = None) -> NDArray[Any]:
    """A column, read-only; ``ProtocolError`` unless it has ``count`` values, or without it a whole number."""
    width = np.dtype(dtype).itemsize
    if len(content) % width or (count is not None and len(content) != width * count):
        wanted = "a whole number" if count is None else f"{count} values"
        raise ProtocolError(f"columns: {len(content)} bytes of {name} are not {wanted} of {width} bytes each")
    return np.frombuffer(content, dtype=dtype)


def num_rows(groups: Iterable[Any]) -> int:
    """Items of all groups; a group without any counts as one."""
    return sum(max(len(group.sessions) // SESSION_BYTES, 1) for group in groups)


def total(name: str, counts: NDArray[Any]) -> int:
    """What the counts come to; ``ProtocolError`` for a negative one, or for more than a message holds."""
    found = int(counts.sum(dtype=np.uint64)) if counts.dtype.kind == "u" else int(counts.sum(dtype=np.int64))
    if counts.size and (int(counts.min()) < 0 or found > LINK_FIELDS.most):
        raise ProtocolError(f"columns: {name} comes to {found} values; at most {LINK_FIELDS.most}, none negative")
    return found


def spans(sizes: Iterable[int]) -> Iterator[slice]:
    """Where each row lies in a column of all rows' values."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def sums_by_row(values: NDArray[Any], counts: Sequence[int]) -> list[int]:
    """Sum of each row's values, of which it has ``counts``."""
    ends = np.cumsum(values, dtype=np.int64)
    edges = np.concatenate((np.zeros(1, dtype=np.int64), ends))[np.cumsum((0, *counts))]
    found: list[int] = np.diff(edges).tolist()
    return found
