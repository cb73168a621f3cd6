"""What HTTP adds to gRPC: `python scripts/http_overhead.py --users 1 256 --target-ms 10 --gateways 1`.

Starts a target and a draft of stand-ins, a coordinator and gateways, each a process of its own, and streams the same
requests through the SDK and over HTTP in turns. Prints, for each number of users, medians of the time to the first
token and of the time a token, and the tokens a second of all streams together. `--coordinator` and `--url` measure what
runs already instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import uvloop

from outrider.benchmarks.child_process import child_process
from outrider.cli.stack.held_ports import hold_port
from outrider.client import AsyncClient
from outrider.demo import TARGET

PROMPT = [11, 7, 5, 3]


@dataclass(frozen=True, slots=True)
class Heard:
    """One stream, in seconds."""

    first: float
    """To the first token."""
    total: float
    num_tokens: int

    @property
    def per_token_ms(self) -> float:
        """After the first message."""
        return 1e3 * (self.total - self.first) / max(1, self.num_tokens - 1)


Ask = Callable[[int], Awaitable[Heard]]


async def over_grpc(client: AsyncClient, num_tokens: int) -> Heard:
    """One stream through the SDK."""
    began, first, count = time.perf_counter(), 0.0, 0
    options = {"prompt_token_ids": PROMPT, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    async for delta in client.stream(**options):  # type: ignore[arg-type]
        if delta.token_ids:
            first = first or time.perf_counter() - began
            count += len(delta.token_ids)
    return Heard(first, time.perf_counter() - began, count)


async def over_http(host: str, port: int, num_tokens: int) -> Heard:
    """One stream over a connection of its own; its events are counted, and the last one tells the tokens."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        body = json.dumps(
            {
                **{"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True},
                "stream_options": {"include_usage": True},
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        began, first, last = time.perf_counter(), 0.0, b""
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - began
                last = line
            elif not line or line.startswith(b"HTTP/1.1 4") or line.startswith(b"HTTP/1.1 5"):
                raise RuntimeError(f"the gateway answered {line!r}")
        count = json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return Heard(first, time.perf_counter() - began, count)
    finally:
        writer.close()


async def measure(ask: Ask, num_users: int, num_tokens: int) -> tuple[list[Heard], float]:
    """All users at once; what each heard, and the tokens a second of all."""
    began = time.perf_counter()
    heard = await asyncio.gather(*(ask(num_tokens) for _ in range(num_users)))
    return heard, sum(one.num_tokens for one in heard) / (time.perf_counter() - began)


async def compare(coordinator: str, url: str, given: argparse.Namespace) -> None:
    """Rounds of both in turns, and their medians."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with AsyncClient(coordinator) as client:
        asks: dict[str, Ask] = {
            "grpc": lambda count: over_grpc(client, count),
            "http": lambda count: over_http(host, int(port), count),
        }
        for ask in asks.values():
            await measure(ask, 1, given.num_tokens)
        for num_users in given.users:
            found: dict[str, list[tuple[list[Heard], float]]] = {name: [] for name in asks}
            for _ in range(given.rounds):
                for name, ask in asks.items():
                    found[name].append(await measure(ask, num_users, given.num_tokens))
            print(json.dumps({"users": num_users, **summary(found)}))


def summary(found: dict[str, list[tuple[list[Heard], float]]]) -> dict[str, float]:
    """Medians of both, and how they compare."""
    first = {name: median([1e3 * one.first for heard, _ in rounds for one in heard]) for name, rounds in found.items()}
    token = {name: median([one.per_token_ms for heard, _ in rounds for one in heard]) for name, rounds in found.items()}
    rate = {name: median([speed for _, speed in rounds]) for name, rounds in found.items()}
    return {
        **{f"{name}_first_ms": value for name, value in first.items()},
        **{f"{name}_token_ms": value for name, value in token.items()},
        **{f"{name}_tokens_s": value for name, value in rate.items()},
        "first_difference_ms": round(first["http"] - first["grpc"], 3),
        "token_ratio": round(token["http"] / token["grpc"], 3),
        "rate_ratio": round(rate["http"] / rate["grpc"], 3),
    }


def median(values: Sequence[float]) -> float:
    """To a microsecond."""
    return round(statistics.median(values), 3)


@contextlib.asynccontextmanager
async def stack(given: argparse.Namespace, folder: str) -> AsyncIterator[tuple[str, str]]:
    """The processes; the coordinator's address, and the gateways' URL."""
    async with contextlib.AsyncExitStack() as running:

        async def service(role: str, *arguments: str) -> str:
            module = ("outrider.benchmarks.step.service", role, "127.0.0.1:0", "--stamps", f"{folder}/{role}")
            address, _ = await running.enter_async_context(child_process("-m", *module, *arguments))
            return address

        target = await service("target", "--busy-ms", str(given.target_ms))
        draft = await service("draft", "--busy-ms", str(given.draft_ms))
        named = ("--target-address", target, "--draft-address", draft, "--tokenizer", str(TARGET))
        coordinator = await service("coordinator", *named)
        port = hold_port()
        for _ in range(given.gateways):
            flags = ("--coordinator", coordinator, "--port", str(port), "--drain-delay-s", "0", "--log-level", "error")
            resumption = ("--resume-timeout-s", str(given.resume_timeout_s))
            await running.enter_async_context(child("outrider.gateway", *flags, "--reuse-port", *resumption))
        await until_listening(port)
        yield coordinator, f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[None]:
    """A process of a module, ended at the end."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def until_listening(port: int) -> None:
    """Return when the gateway takes connections."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def run(given: argparse.Namespace) -> None:
    """Measure what the arguments say."""
    if given.coordinator:
        await compare(given.coordinator, given.url, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        async with stack(given, folder) as (coordinator, url):
            await compare(coordinator, url, given)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, nargs="+", default=[1])
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--target-ms", type=float, default=5.0)
    parser.add_argument("--draft-ms", type=float, default=3.0)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--resume-timeout-s", type=float, default=30.0)
    parser.add_argument("--coordinator", default="", help="one that runs already")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of its gateway")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
