"""Load of a batch-invariant pair: users who come and go with long texts, while drafts are killed."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

from outrider import AsyncClient
from outrider.errors import OutriderError
from tests.faults.stack import Stack

_NUM_PREFIXES, _PREFIX_LENGTH = 4, 600
_FEWEST_NEW = 250
"""Tokens of the shortest request."""


@dataclass(slots=True)
class Stream:
    """Text of one user, which a chain of requests writes; each has all of it before as its prompt."""

    seed: int
    temperature: float
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    num_requests: int = 0

    @property
    def text(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Load:
    """Users of a run and what they ask for."""

    num_users: int
    num_tokens: int
    """Length of each user's output."""
    temperatures: tuple[float, ...]
    """Temperatures of the users in turn."""
    vocab_size: int
    arrival_s: float = 8.0
    """Users begin within this time."""
    kill_every_s: float = 15.0
    limit_s: float = 3600.0
    """No request begins after this time, and what is under way then is broken off."""
    longest_request: int = 2500

    def streams(self) -> list[Stream]:
        """Users with prompts of different lengths; several share a prefix."""
        rng = random.Random(0)

        def ids(count: int) -> list[int]:
            return [rng.randrange(300, self.vocab_size) for _ in range(count)]

        prefixes = [ids(_PREFIX_LENGTH) for _ in range(_NUM_PREFIXES)]
        return [
            Stream(number, self.temperatures[number % len(self.temperatures)],
                   prefixes[rng.randrange(_NUM_PREFIXES)] + ids(rng.randrange(20, 400)))
            for number in range(self.num_users)
        ]  # fmt: skip


async def play(stack: Stack, client: AsyncClient, load: Load, streams: list[Stream]) -> int:
    """Let all users write until they have their tokens or the time is over; returns how often a draft was killed."""
    ends_at, killed = time.monotonic() + load.limit_s, list[str]()
    kills = asyncio.create_task(_kill(stack, load.kill_every_s, killed))
    try:
        await asyncio.gather(*(_write(client, load, stream, ends_at) for stream in streams))
    finally:
        kills.cancel()
    return len(killed)


async def _kill(stack: Stack, every_s: float, killed: list[str]) -> None:
    for draft in itertools.cycle(stack.drafts):
        await asyncio.sleep(every_s)
        draft.kill()
        killed.append(draft.name)


async def _write(client: AsyncClient, load: Load, stream: Stream, ends_at: float) -> None:
    rng = random.Random(stream.seed)
    await asyncio.sleep(rng.uniform(0, load.arrival_s))
    while len(stream.output) < load.num_tokens:
        left = load.num_tokens - len(stream.output)
        count = min(left, rng.randrange(min(_FEWEST_NEW, load.longest_request), load.longest_request + 1))
        try:
            async with asyncio.timeout(ends_at - time.monotonic()):
                stream.output += await generate(client, stream, stream.text, count)
        except TimeoutError:
            return
        stream.num_requests += 1


async def generate(
    client: AsyncClient, stream: Stream, prompt: list[int], count: int, *, draft_length: int | None = None
) -> tuple[int, ...]:
    """Next tokens of the stream after ``prompt``."""
    try:
        result = await client.generate(
            prompt_token_ids=prompt, max_tokens=count, ignore_eos=True, temperature=stream.temperature,
            acceptance_method="coupled" if stream.temperature else None, seed=stream.seed,
            num_speculative_tokens=draft_length, cache_salt="alone" if draft_length == 0 else None,
        )  # fmt: skip
    except OutriderError as error:
        raise RuntimeError(f"user {stream.seed}, after {len(stream.output)} tokens: {error}") from error
    return result.token_ids
