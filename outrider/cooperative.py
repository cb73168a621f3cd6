"""Cooperative work: long computations on an event loop, in slices between which other tasks run.

The work is a generator that yields where it may pause, and returns its result. A thread would not help: one C call over
a long list holds the interpreter lock from beginning to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence, Sized
from typing import TypeVar

ResultT = TypeVar("ResultT")
EntryT = TypeVar("EntryT")

Work = Generator[None, None, ResultT]
"""Work with pauses."""
SLICE_ENTRIES = 8_192
"""Entries of a list between two pauses: some tenths of a millisecond, whatever is done with them."""
SLICE_S = 0.001
"""Time of work before other tasks run."""


def run(work: Work[ResultT]) -> ResultT:
    """Run the work without pauses and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def run_in_slices(work: Work[ResultT]) -> ResultT:
    """Run the work and return its result; other tasks of the event loop run after every ``SLICE_S``."""
    pause_at = time.perf_counter() + SLICE_S
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        if time.perf_counter() >= pause_at:
            await asyncio.sleep(0)
            pause_at = time.perf_counter() + SLICE_S


def is_long(entries: Sized) -> bool:
    """True if work on a list has pauses. Work on short lists is done in one turn, however busy the machine is."""
    return len(entries) > SLICE_ENTRIES


def slices_of(entries: Sequence[EntryT]) -> Iterator[Sequence[EntryT]]:
    """A list in parts of ``SLICE_ENTRIES``; a short list is returned as its only part."""
    if not is_long(entries):
        yield entries
        return
    for start in range(0, len(entries), SLICE_ENTRIES):
        yield entries[start : start + SLICE_ENTRIES]


async def gather_limited(
    work: Callable[[EntryT], Awaitable[ResultT]], entries: Sequence[EntryT], *, most: int
) -> list[ResultT]:
    """Await ``work(entry)`` for each entry, at most ``most`` at the same time, and return the results in order.

    The first error cancels the others and is raised. There are ``most`` tasks, which take the next entry: cancelling a
    task for each entry that waits at a semaphore takes time that is quadratic in their number.
    """
    results: dict[int, ResultT] = {}
    numbered = iter(enumerate(entries))

    async def take_next() -> None:
        for index, entry in numbered:
            results[index] = await work(entry)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(most, len(entries))):
                group.create_task(take_next())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [results[index] for index in range(len(entries))]
