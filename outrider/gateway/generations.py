"""Generations of one HTTP request: one call of the SDK per choice, collected or merged into one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from outrider.client import GenerateOptions
from outrider.cooperative import gather_limited
from outrider.generation import Delta, GenerationResult

MAX_AT_ONCE = 256
"""Generations of one request that run at the same time; the others wait for one of them to end."""


class GenerationClient(Protocol):
    """The part of ``AsyncClient`` that generates."""

    async def generate(self, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """One generation."""

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Delta, None]:
        """One generation as a stream; closing it cancels."""


@dataclass(frozen=True, slots=True)
class GenerationChoice:
    """One generation of a request."""

    index: int
    """Index in the answer."""
    prompt: int
    """The place of its prompt."""
    options: GenerateOptions


async def generate_all(client: GenerationClient, choices: Sequence[GenerationChoice]) -> list[GenerationResult]:
    """The results in order. The first error cancels the others and is raised; so does cancellation."""
    if len(choices) == 1:
        return [await client.generate(**choices[0].options)]
    return await gather_limited(lambda choice: client.generate(**choice.options), choices, most=MAX_AT_ONCE)


async def stream_all(
    client: GenerationClient, choices: Sequence[GenerationChoice]
) -> AsyncGenerator[tuple[GenerationChoice, Delta], None]:
    """Deltas of all choices as they arrive, in order within each choice. Closing the generator cancels all."""
    if len(choices) == 1:
        async with contextlib.aclosing(client.stream(**choices[0].options)) as deltas:
            async for delta in deltas:
                yield choices[0], delta
        return
    async with contextlib.aclosing(_merge(client, choices)) as merged:
        async for found in merged:
            yield found


async def _merge(
    client: GenerationClient, choices: Sequence[GenerationChoice]
) -> AsyncGenerator[tuple[GenerationChoice, Delta], None]:
    # A reader that is slow holds up the generations behind a queue that is full, as it does with one of them.
    queue: asyncio.Queue[tuple[GenerationChoice, Delta] | BaseException | None] = asyncio.Queue(2 * MAX_AT_ONCE)

    async def pump(choice: GenerationChoice) -> None:
        async with contextlib.aclosing(client.stream(**choice.options)) as deltas:
            async for delta in deltas:
                await queue.put((choice, delta))

    async def pump_all() -> None:
        try:
            await gather_limited(pump, choices, most=MAX_AT_ONCE)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumping = asyncio.create_task(pump_all())
    try:
        while (found := await queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
