"""Generations of one HTTP request: one call of the SDK per choice, collected or merged into one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from outrider.client import GenerateOptions
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
class Choice:
    """One generation of a request."""

    index: int
    """Its place in the answer."""
    prompt: int
    """The place of its prompt."""
    options: GenerateOptions


async def generate_all(client: GenerationClient, choices: Sequence[Choice]) -> list[GenerationResult]:
    """The results in order. The first error cancels the others and is raised; so does cancellation."""
    if len(choices) == 1:
        return [await client.generate(**choices[0].options)]
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(choice: Choice) -> GenerationResult:
        async with room:
            return await client.generate(**choice.options)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(choice)) for choice in choices]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def stream_all(client: GenerationClient, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
    """Deltas of all choices as they arrive, in order within each choice. Closing the generator cancels all."""
    if len(choices) == 1:
        async with contextlib.aclosing(client.stream(**choices[0].options)) as deltas:
            async for delta in deltas:
                yield choices[0], delta
        return
    async with contextlib.aclosing(_merge(client, choices)) as merged:
        async for found in merged:
            yield found


async def _merge(client: GenerationClient, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
    # A reader that is slow holds up the generations behind a queue that is full, as it does with one of them.
    queue: asyncio.Queue[tuple[Choice, Delta] | BaseException | None] = asyncio.Queue(2 * MAX_AT_ONCE)
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def pump(choice: Choice) -> None:
        try:
            async with room, contextlib.aclosing(client.stream(**choice.options)) as deltas:
                async for delta in deltas:
                    await queue.put((choice, delta))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    num_running = len(tasks)
    try:
        while num_running:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                num_running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
