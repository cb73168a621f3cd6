"""Columns of a message: one array for each field of many items, as little-endian bytes.

What commands and answers have in common: writing, and checks of all lengths against each other before anything is made
of the arrays. Knows no fields of either.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ProtocolError
from outrider.limits import LINK_FIELDS
from outrider.transport.convert.arrays import little_endian

SESSION_BYTES = 8
_FEW = 64
"""Fewer numbers than this are added up faster as a list than as an array."""


def to_bytes(code: str, values: Sequence[int]) -> bytes:
    """Numbers as ``array`` has them; ``OverflowError`` for one that does not fit."""
    return little_endian(array(code, values)).tobytes()


def array_bytes(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """An array of numbers that fit the type."""
    return values.tobytes() if values.dtype is dtype else values.astype(dtype).tobytes()


def joined(rows: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> bytes:
    """Arrays, one after the other."""
    return np.concatenate(rows).astype(dtype, copy=False).tobytes()


def from_bytes(name: str, content: bytes, dtype: np.dtype[Any], count: int | None = None) -> NDArray[Any]:
    """A column, read-only; ``ProtocolError`` unless it has ``count`` values, or without it a whole number."""
    width = dtype.itemsize
    if len(content) != width * (len(content) // width if count is None else count):
        wanted = "a whole number" if count is None else f"{count} values"
        raise ProtocolError(f"columns: {len(content)} bytes of {name} are not {wanted} of {width} bytes each")
    return np.frombuffer(content, dtype)  # by name it takes three times as long


def num_rows(groups: Iterable[Any]) -> int:
    """Items of all groups; a group without any counts as one."""
    return sum([len(group.sessions) // SESSION_BYTES or 1 for group in groups])


def total(name: str, counts: NDArray[Any]) -> int:  # of 32 bits each
    """What the counts come to; ``ProtocolError`` for a negative one, or for more than a message holds."""
    found = sum(counts.tolist()) if counts.size < _FEW else int(np.add.reduce(counts, dtype=np.int64))
    if found > LINK_FIELDS.most or (counts.size and counts.item(counts.argmin()) < 0):
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
