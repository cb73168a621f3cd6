"""Packed arrays of a message: one array for each field of many items, as little-endian bytes.

What commands and answers have in common: writing, and checks of all lengths against each other before anything is made
of the arrays. Knows no fields of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ProtocolError
from outrider.limits import Bound

SESSION_BYTES = 8
_FEW = 64
"""Fewer numbers than this are added up faster as a list than as an array."""


def array_bytes(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """An array of numbers that fit the type."""
    return values.tobytes() if values.dtype is dtype else values.astype(dtype).tobytes()


def from_bytes(name: str, content: bytes, dtype: np.dtype[Any], count: int | None = None) -> NDArray[Any]:
    """A column, read-only; ``ProtocolError`` unless it has ``count`` values, or without it a whole number."""
    width = dtype.itemsize
    if len(content) != width * (len(content) // width if count is None else count):
        wanted = "a whole number" if count is None else f"{count} values"
        raise ProtocolError(f"columns: {len(content)} bytes of {name} are not {wanted} of {width} bytes each")
    return np.frombuffer(content, dtype)  # by name it takes three times as long


def num_rows(columns: Any) -> int:  # noqa: ANN401 - generated types share no base
    """Rows of commands or answers; those without any count as one."""
    return len(columns.sessions) // SESSION_BYTES or 1


def check_largest(name: str, largest: int, bound: Bound) -> None:
    """``ProtocolError`` if a row has more than ``bound``."""
    if largest > bound.most:
        raise ProtocolError(f"columns: a row of {name} has {largest} {bound.unit}; at most {bound.most}")


def total(name: str, counts: NDArray[Any]) -> int:  # of 32 bits each
    """Sum of the counts; ``ProtocolError`` for a negative one. A message is too short for a sum that is too large."""
    found = sum(counts.tolist()) if counts.size < _FEW else int(np.add.reduce(counts, dtype=np.int64))
    if counts.size and counts.item(counts.argmin()) < 0:
        raise ProtocolError(f"columns: {name} has a negative value, {counts.min()}")
    return found


def sums_by_row(values: NDArray[Any], counts: Sequence[int]) -> list[int]:
    """Sum of each row's values, of which it has ``counts``."""
    ends = np.cumsum(values, dtype=np.int64)
    edges = np.concatenate((np.zeros(1, dtype=np.int64), ends))[np.cumsum((0, *counts))]
    found: list[int] = np.diff(edges).tolist()
    return found
