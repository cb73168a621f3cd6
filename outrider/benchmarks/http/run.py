"""Servers in turn, with the same requests, from the same client processes.

Owns the order: users by users, in each group of prompts one server after the other. Starts no server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from outrider.benchmarks.http.streams import TimedStream, stream_completion
from outrider.benchmarks.peers.run import Load, PeerOutcome, Prompt, num_different, read_outcome
from outrider.benchmarks.samples import median
from outrider.errors import OutriderError, UnavailableError

_START_DELAY_S = 0.02
"""Delay from the moment at which the processes get their requests to that at which all send them."""

Send = Callable[[str, Sequence[Mapping[str, Any]]], list[TimedStream]]
"""(address, bodies) to their streams; all bodies are sent at the same time."""


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A server, or one way to ask it."""

    name: str
    url: str
    body: dict[str, Any] = field(default_factory=dict)
    """Fields of each request besides prompt and length."""


@dataclass(frozen=True, slots=True)
class HttpPlan:
    """Requests for every server."""

    servers: tuple[ServerUnderTest, ...]
    loads: tuple[Load, ...]
    num_tokens: int
    num_warmups: int = 1
    """Unmeasured repetitions of each load."""


@contextmanager
def client_processes(num_processes: int, timeout_s: float) -> Iterator[Send]:
    """Processes that divide the requests of a call among them; ``timeout_s`` is the limit of one call."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(time.sleep, [_START_DELAY_S] * num_processes))  # all have started

        def send(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[TimedStream]:
            shares = [bodies[number::num_processes] for number in range(min(num_processes, len(bodies)))]
            start = time.monotonic() + _START_DELAY_S
            futures = [pool.submit(_send_share, url, share, start, timeout_s) for share in shares]
            streams: list[TimedStream | None] = [None] * len(bodies)
            for number, future in enumerate(futures):
                streams[number::num_processes] = future.result()
            return [stream for stream in streams if stream is not None]

        yield send


def _send_share(url: str, bodies: Sequence[Mapping[str, Any]], start: float, timeout_s: float) -> list[TimedStream]:
    async def run() -> list[TimedStream]:
        await asyncio.sleep(start - time.monotonic())
        async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
            return list(await asyncio.gather(*(stream_completion(url, body) for body in bodies)))

    try:
        return asyncio.run(run())
    except TimeoutError as error:
        raise UnavailableError(f"{url}: no end within {timeout_s:g} s") from error


def run_plan(
    plan: HttpPlan,
    send: Send,
    *,
    on_done: Callable[[PeerOutcome], None] = lambda outcome: None,
    on_failed: Callable[[str, int, OutriderError], None] = lambda name, num_users, error: None,
) -> list[PeerOutcome]:
    """Outcomes of all servers and numbers of users. A server that fails is left out from then on."""
    outcomes: list[PeerOutcome] = []
    servers = list(plan.servers)
    for load in plan.loads:
        timed: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
        for index in range(-plan.num_warmups, len(load.groups)):
            group = load.groups[max(0, index)]
            for server in list(servers):
                try:
                    found = _time_group(send, server, group, plan.num_tokens)
                except OutriderError as error:
                    servers.remove(server)
                    on_failed(server.name, load.num_users, error)
                else:
                    timed[server.name] += [found] if index >= 0 else []
        for server in servers:
            outcomes.append(read_outcome(server.name, load.num_users, "", timed[server.name], plan.num_tokens))
            on_done(outcomes[-1])
    return outcomes


def _time_group(send: Send, server: ServerUnderTest, group: Sequence[Prompt], num_tokens: int) -> dict[str, Any]:
    """Times of prompts that go together: with one new token each, and with all."""
    one = send(server.url, _bodies(server, group, 1))
    whole = send(server.url, _bodies(server, group, num_tokens))
    for streams, wanted in ((one, 1), (whole, num_tokens)):
        wrong = next((stream.num_tokens for stream in streams if stream.num_tokens != wanted), None)
        if wrong is not None:
            raise UnavailableError(f"{server.url} ended a stream after {wrong} tokens, not {wanted}")
    return {
        "tokens": [stream.token_ids or tuple(stream.text.encode()) for stream in whole],
        "first_s": _span(one),
        "whole_s": _span(whole),
        "streams_s": fmean(stream.last - stream.first for stream in whole),
    }


def _bodies(server: ServerUnderTest, group: Sequence[Prompt], num_tokens: int) -> list[dict[str, Any]]:
    """Requests whose prompts no earlier call has put into a prefix cache."""
    shared = {
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": f"bench-{secrets.token_hex(8)}",
        **server.body,
    }
    return [{"prompt": list(prompt), **shared} for prompt in group]


def _span(streams: Sequence[TimedStream]) -> float:
    """Seconds from the first request to the end of the last."""
    return max(stream.last for stream in streams) - min(stream.began for stream in streams)


def to_row(outcome: PeerOutcome, outcomes: Sequence[PeerOutcome]) -> tuple[str, int, float, float, float, float, str]:
    """(server, users, first token ms, ms a token of a stream, after the first, until all ended, prompts as the first
    server of ``outcomes`` with as many users).
    """
    reference = next((one for one in outcomes if one.num_users == outcome.num_users), outcome)
    same = len(outcome.tokens) - num_different(outcome, reference)
    series = (outcome.first_ms, outcome.ms_per_token, outcome.after_first_ms, outcome.all_ms)
    first, token, after, until_all = (median(samples) or 0.0 for samples in series)
    return outcome.engine, outcome.num_users, first, token, after, until_all, f"{same}/{len(outcome.tokens)}"


def to_json(outcomes: Sequence[PeerOutcome], plan: HttpPlan) -> dict[str, Any]:
    """All samples, in milliseconds, and what was asked."""
    rows = []
    for outcome in outcomes:
        row = dataclasses.asdict(outcome)
        del row["tokens"], row["version"]
        rows.append({**row, "prompts_as_the_first": to_row(outcome, outcomes)[-1]})
    return {
        "servers": [dataclasses.asdict(server) for server in plan.servers],
        "input_lens": sorted({len(prompt) for load in plan.loads for group in load.groups for prompt in group}),
        "output_len": plan.num_tokens,
        "rows": rows,
    }
