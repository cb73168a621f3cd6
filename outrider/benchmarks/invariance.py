"""The same requests in different company: how often their output differs from that of each alone without drafts.

Arms differ in the number of concurrent requests, the draft length, and whether prompts are in the prefix cache. Greedy
and coupled output promise the same tokens in every arm; near ties break the promise where logits depend on the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from outrider.client import AsyncClient
from outrider.generation import GenerationResult

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """Company of the requests."""

    batch_size: int
    """Concurrent requests."""
    draft_length: int
    is_cached: bool = False
    """True if the prefix cache may hold the prompts."""

    def __str__(self) -> str:
        return f"batch {self.batch_size}, K = {self.draft_length}" + (", cached" if self.is_cached else "")


REFERENCE = Arm(1, 0)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of every arm; the number of a prompt is added to the seed."""

    prompts: tuple[Prompt, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    """Most likely tokens whose logprobs are compared too; None: no logprobs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm against the reference."""

    arm: Arm
    num_streams: int
    num_differing: int
    """Streams with other tokens."""
    num_equal_tokens: int
    """Tokens before the first difference of each stream."""
    num_other_logprobs: int = 0
    """Streams with the same tokens and other bits in a logprob."""
    num_preempted: int | None = None
    """Sessions that the target preempted in the arm; None: they were not counted."""

    @property
    def per_10_000(self) -> float:
        """First differences per 10,000 tokens that could have differed."""
        return 1e4 * self.num_differing / max(1, self.num_equal_tokens + self.num_differing)


def arms_of(batch_sizes: Sequence[int], draft_lengths: Sequence[int]) -> tuple[Arm, ...]:
    """The grid, and each batch size again with prompts from the prefix cache."""
    cached = (Arm(size, draft_lengths[-1], is_cached=True) for size in batch_sizes)
    return (*(Arm(size, length) for size in batch_sizes for length in draft_lengths), *cached)


async def run_arms(
    client: AsyncClient,
    workload: Workload,
    arms: Sequence[Arm],
    *,
    on_done: Callable[[], None] = lambda: None,
    count_preempted: Callable[[], Awaitable[int]] | None = None,
) -> list[Difference]:
    """The reference, then each arm against it; ``on_done`` counts requests."""
    expected, differences = await _run(client, workload, REFERENCE, on_done), []
    for arm in arms:
        before = 0 if count_preempted is None else await count_preempted()
        found = compare(arm, expected, await _run(client, workload, arm, on_done))
        if count_preempted is not None:
            found = replace(found, num_preempted=await count_preempted() - before)
        differences.append(found)
    return differences


def compare(arm: Arm, expected: Sequence[GenerationResult], found: Sequence[GenerationResult]) -> Difference:
    """Compare the results of the same prompts."""
    pairs = list(zip(expected, found, strict=True))
    same = [one.token_ids == other.token_ids for one, other in pairs]
    return Difference(
        arm,
        len(pairs),
        num_differing=same.count(False),
        num_equal_tokens=sum(_num_equal(one.token_ids, other.token_ids) for one, other in pairs),
        num_other_logprobs=sum(
            is_same and one.logprobs != other.logprobs for is_same, (one, other) in zip(same, pairs, strict=True)
        ),
    )


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


async def _run(
    client: AsyncClient, workload: Workload, arm: Arm, on_done: Callable[[], None]
) -> list[GenerationResult]:
    free = asyncio.Semaphore(arm.batch_size)

    async def send(number: int, prompt: Prompt) -> GenerationResult:
        async with free:
            result = await client.generate(
                prompt_token_ids=prompt,
                max_tokens=workload.max_tokens,
                ignore_eos=True,
                temperature=workload.temperature,
                acceptance_method="coupled" if workload.temperature else None,
                seed=workload.seed + number,
                num_speculative_tokens=arm.draft_length,
                logprobs=workload.logprobs,
                # An arm's own name keeps prompts of other arms out of its cache.
                cache_salt="cached" if arm.is_cached else str(arm),
            )
        on_done()
        return result

    return await asyncio.gather(*(send(number, prompt) for number, prompt in enumerate(workload.prompts)))
