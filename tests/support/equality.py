"""Equality of values that hold arrays, which their own ``==`` does not answer, and batches as single events."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from outrider.ports import EventBatch


def same(one: Any, other: Any) -> bool:
    """Equal type by type, arrays by dtype, shape and every value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


def one_by_one(batch: EventBatch[Any]) -> EventBatch[Any]:
    """The same events, those of the arrays among them, each with its time or None."""
    timed = [*batch.timed()]
    for batched in batch.batched:
        indices = range(len(batched.sessions))
        timed += zip(batched.events(indices), batched.timings(indices), strict=True)
    timings: Any = tuple([timing for _, timing in timed])
    return EventBatch(tuple([event for event, _ in timed]), batch.report, timings)
