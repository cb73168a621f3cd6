"""Load generation: sends requests as traffic says and records when each message of a response came.

Owns the clock, and how a load is divided into shares. Computes no statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.benchmarks.serving.records import Record, Run
from outrider.benchmarks.serving.workload import Prompt, Traffic, arrival_times
from outrider.client import AsyncClient
from outrider.errors import OutriderError
from outrider.types import Grammar, GrammarKind


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
    """Seed of the first request; the next request's is one more."""
    cache_salt: str = ""
    """Prompts of another salt are not found in a prefix cache."""
    grammar: Grammar | None = None
    """Grammar that the output has to match. Ends of sequence then count."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a load that one client process sends: whole users, with the requests of each."""

    indexes: tuple[int, ...]
    """Indexes of the requests in the whole load."""
    prompts: tuple[Prompt, ...]
    due_times: tuple[float, ...]
    """Seconds after the start of the run."""
    max_concurrency: int | None
    decoding: Decoding


def divide(prompts: Sequence[Prompt], traffic: Traffic, decoding: Decoding, num_shares: int) -> list[Share]:
    """Divide the users, and with them the prompts, as evenly as possible; fewer shares where there are fewer users.

    Request ``i`` is of user ``i % users``, and user ``u`` of share ``u % shares``. A share has as much concurrency as
    users, so with fewer users than prompts an idle process takes over nothing from a busy one.
    """
    due_times = arrival_times(traffic, len(prompts), decoding.seed)
    num_users = users_of(prompts, traffic)
    num_shares = max(1, min(num_shares, num_users))
    shares = []
    for number in range(num_shares):
        indexes = tuple(index for index in range(len(prompts)) if index % num_users % num_shares == number)
        concurrency = None if traffic.max_concurrency is None else len(range(number, num_users, num_shares))
        prompts_here = tuple(prompts[index] for index in indexes)
        due_here = tuple(due_times[index] for index in indexes)
        shares.append(Share(indexes, prompts_here, due_here, concurrency, decoding))
    return shares


def users_of(prompts: Sequence[Prompt], traffic: Traffic) -> int:
    """Most requests that may be under way at a time."""
    return len(prompts) if traffic.max_concurrency is None else min(traffic.max_concurrency, len(prompts))


async def run_load(
    client: AsyncClient,
    prompts: Sequence[Prompt],
    traffic: Traffic,
    decoding: Decoding,
    *,
    began: float | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Send every prompt when it is due, from this process; returns when all have ended.

    ``began`` is the moment of ``perf_counter`` from which records count; None: now.
    """
    (share,) = divide(prompts, traffic, decoding, 1)
    processor = time.process_time()
    records = await send(client, share, time.perf_counter() if began is None else began, on_done=on_done)
    return join([(share, records, time.process_time() - processor)], users_of(prompts, traffic))


async def send(
    client: AsyncClient, share: Share, began: float, *, on_done: Callable[[], None] = lambda: None
) -> list[Record]:
    """Send the requests of a share when they are due; ``began`` is the run's start on the clock of ``perf_counter``."""
    limit = contextlib.nullcontext() if share.max_concurrency is None else asyncio.Semaphore(share.max_concurrency)

    async def one(place: int) -> Record:
        await asyncio.sleep(began + share.due_times[place] - time.perf_counter())
        async with limit:
            record = await _request(client, share.prompts[place], share.decoding, share.indexes[place], began)
        on_done()
        return record

    return list(await asyncio.gather(*map(one, range(len(share.prompts)))))


def join(parts: Sequence[tuple[Share, Sequence[Record], float]], num_users: int) -> Run:
    """One run of all shares, each with its records and its process's processor time in seconds: nothing is averaged."""
    placed = {
        index: record for share, records, _ in parts for index, record in zip(share.indexes, records, strict=True)
    }
    records = tuple(record for _, record in sorted(placed.items()))
    duration = max(record.ended_at for record in records)
    return Run(records, duration, num_users, max(seconds for *_, seconds in parts) / duration)


def _grammar_options(grammar: Grammar | None) -> Any:  # noqa: ANN401 - options of the SDK
    if grammar is None:
        return {}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return {"json_schema": grammar.text}
    return {"regex": grammar.text}


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
            ignore_eos=decoding.ignore_eos and decoding.grammar is None,
            acceptance_method=decoding.acceptance_method,
            num_speculative_tokens=decoding.num_speculative_tokens,
            seed=decoding.seed + index,
            cache_salt=decoding.cache_salt,
            **_grammar_options(decoding.grammar),
        ):
            if delta.token_ids:
                times.append(time.perf_counter() - began)
                counts.append(len(delta.token_ids))
            result = delta.result or result
    except OutriderError as failure:
        error = f"{type(failure).__name__}: {failure}"
    ended_at = time.perf_counter() - began
    return Record(len(prompt), sent_at, ended_at, tuple(times), tuple(counts), result, error)
