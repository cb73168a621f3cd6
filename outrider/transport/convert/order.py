"""Order of a message: steps of many sessions together, and the items of each session as they were sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.batched import CommandBatch

Run = tuple[list[Any], list[Any], list[Any]]
"""Items that come before steps of different sessions, these steps, and items that come after them."""


def in_runs(items: Sequence[Any], steps: tuple[type, ...]) -> Iterator[Run]:
    """The items in as few runs as keep the order of each session's. ``steps``: types of those that become arrays."""
    run: Run = ([], [], [])
    sessions = set[int]()
    for item in items:
        if not isinstance(item, steps):
            has_step = getattr(item, "session", None) in sessions
            run[2 if has_step else 0].append(item)
            continue
        own: Sequence[int] = item.sessions.tolist() if isinstance(item, CommandBatch) else (item.session,)  # type: ignore[attr-defined]
        if not sessions.isdisjoint(own):
            yield run
            run, sessions = ([], [], []), set()
        run[1].append(item)
        sessions.update(own)
    yield run
