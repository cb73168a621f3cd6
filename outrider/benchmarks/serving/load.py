"""Sends requests as traffic says and writes down when what came.

Owns the clock. One record a request; a request that fails is a record too. Knows no statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.benchmarks.serving.workload import Prompt, Traffic, arrival_times
from outrider.client import AsyncClient
from outrider.errors import OutriderError
from outrider.generation import GenerationResult


@dataclass(frozen=True, slots=True)
class Decoding:
    """Parameters of every request, besides its prompt."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = True
    acceptance_method: str | None = None
    num_speculative_tokens: int | None = None
    """None: the server's; 0: no speculation."""
    seed: int = 0
    """Of the first request; the next one's is one more."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its caller saw it. Times are seconds since the run began."""

    num_prompt_tokens: int
    sent_at: float
    ended_at: float
    token_times: tuple[float, ...] = ()
    """When each message with tokens came."""
    token_counts: tuple[int, ...] = ()
    """And how many it brought."""
    result: GenerationResult | None = None
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(self.token_counts)

    @property
    def time_to_first_token(self) -> float | None:
        """From sending; None when none came."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def latency(self) -> float:
        """From sending to the end."""
        return self.ended_at - self.sent_at

    @property
    def time_per_output_token(self) -> float | None:
        """After the first message, by the tokens after the first; None where there was but one token."""
        first = self.time_to_first_token
        return None if first is None or self.num_tokens < 2 else (self.latency - first) / (self.num_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Between one message with tokens and the next: the inter-token latencies."""
        return tuple(later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one go."""

    records: tuple[Record, ...]
    duration: float

    @property
    def completed(self) -> tuple[Record, ...]:
        """Requests that completed."""
        return tuple(record for record in self.records if record.result is not None)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second, of all requests together."""
        return sum(record.num_tokens for record in self.completed) / self.duration


async def run_load(
    client: AsyncClient,
    prompts: Sequence[Prompt],
    traffic: Traffic,
    decoding: Decoding,
    *,
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Send every prompt when it is due; returns when all have ended."""
    limit = contextlib.nullcontext() if traffic.max_concurrency is None else asyncio.Semaphore(traffic.max_concurrency)
    began = time.perf_counter()

    async def one(index: int, due: float) -> Record:
        await asyncio.sleep(began + due - time.perf_counter())
        async with limit:
            record = await _request(client, prompts[index], decoding, index, began)
        on_done()
        return record

    due_times = arrival_times(traffic, len(prompts), decoding.seed)
    records = await asyncio.gather(*(one(index, due) for index, due in enumerate(due_times)))
    return Run(tuple(records), max(record.ended_at for record in records))


async def _request(client: AsyncClient, prompt: Prompt, decoding: Decoding, index: int, began: float) -> Record:
    times: list[float] = []
    counts: list[int] = []
    result, error = None, ""
    sent_at = time.perf_counter() - began
    try:
        async for delta in client.stream(
            prompt_token_ids=prompt,
            max_tokens=decoding.max_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            ignore_eos=decoding.ignore_eos,
            acceptance_method=decoding.acceptance_method,
            num_speculative_tokens=decoding.num_speculative_tokens,
            seed=decoding.seed + index,
        ):
            if delta.token_ids:
                times.append(time.perf_counter() - began)
                counts.append(len(delta.token_ids))
            result = delta.result or result
    except OutriderError as failure:
        error = f"{type(failure).__name__}: {failure}"
    ended_at = time.perf_counter() - began
    return Record(len(prompt), sent_at, ended_at, tuple(times), tuple(counts), result, error)
