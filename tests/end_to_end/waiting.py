"""Waiting for what has to come, always with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outrider.generation import Delta
from tests.support.coordinator_stats import stats_of
from tests.support.stack import Stack

DEADLINE_S = 240.0


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Return as soon as the condition holds; an error that names it when the deadline is past."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"did not come about: {what or condition}") from None


async def again_until(condition: Callable[[], object], play: Callable[[], Awaitable[object]]) -> None:
    """Play once, and again until the condition holds; what did not come about in time is left to assertions after it.

    For what may happen while streams run: on a busy machine short ones may end before it has.
    """
    ends = asyncio.get_running_loop().time() + DEADLINE_S
    await play()
    while not condition() and asyncio.get_running_loop().time() < ends:
        await play()


async def all_free(stack: Stack) -> None:
    """Nothing runs, and every page is free on both services, whose books add up."""

    def is_idle() -> bool:
        stats = stats_of(stack.coordinator)
        services = [service for service in (stack.target, stack.draft) if service is not None]
        return stats.num_running == stats.num_waiting == 0 and not any(service.num_sessions for service in services)

    await eventually(is_idle, "an idle stack")
    assert stack.num_pages_used() == (0, 0)


class Reader:
    """A stream being read: what has come of it so far."""

    def __init__(self, stack: Stack, **options: object) -> None:
        self.deltas: list[Delta] = []
        self._stream = stack.stream(**options)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.deltas for token_id in delta.token_ids)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    async def read(self, num_tokens: int) -> None:
        """Read until at least this many tokens have come."""
        while len(self.token_ids) < num_tokens:
            self.deltas.append(await asyncio.wait_for(anext(self._stream), DEADLINE_S))

    async def finish(self) -> Delta:
        """Read to the end; returns the last delta, which carries the result."""
        async with asyncio.timeout(DEADLINE_S):
            self.deltas += [delta async for delta in self._stream]
        assert [delta.result is not None for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        return self.deltas[-1]

    async def close(self) -> None:
        """Leave the stream, as a client that goes away does."""
        await self._stream.aclose()
