"""Batches of events as single events."""

from __future__ import annotations

from typing import Any

from outrider.ports import EventBatch


def one_by_one(batch: EventBatch[Any]) -> EventBatch[Any]:
    """The same events, those of the columns among them, each with its time or None."""
    timed = [*batch.timed()]
    for columns in batch.columns:
        places = range(len(columns.sessions))
        timed += zip(columns.events(places), columns.timings(places), strict=True)
    timings: Any = tuple([timing for _, timing in timed])
    return EventBatch(tuple([event for event, _ in timed]), batch.report, timings)
