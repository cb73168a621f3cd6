"""The wire benchmark: the echo process is started for each kind of address, then called again and again.

A round trip is timed from before the request is written until the reply is read, in one process, so no clocks are
compared. Every reply is checked against what it must be before anything is timed.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from outrider.benchmarks.child_process import child_process
from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.schema import Label, Result, Series
from outrider.benchmarks.wire.echo import HEADER_BYTES, SERVICE, make_request, reply_to
from outrider.errors import ConfigError, ProtocolError
from outrider.transport.channels import MAX_LINK_MESSAGE_BYTES, open_channel

UNARY, STREAM = "unary", "stream"
TCP, UNIX = "tcp", "unix"
_ECHO = "outrider.benchmarks.wire.echo"

Call = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class WirePlan:
    """Combinations to time."""

    num_bytes: tuple[int, ...] = (200, 20_000, 2_000_000)
    """Sizes of a request."""
    reply_bytes: int | None = 16
    """Size of a request's reply; None: that of the request."""
    calls: tuple[str, ...] = (UNARY, STREAM)
    over: tuple[str, ...] = (TCP, UNIX)
    num_samples: int = 200
    num_warmups: int = 20

    @property
    def num_cases(self) -> int:
        """Combinations."""
        return len(self.num_bytes) * len(self.calls) * len(self.over)

    def __post_init__(self) -> None:
        if min(self.num_bytes) < HEADER_BYTES:
            raise ConfigError("--num-bytes", f"must be at least {HEADER_BYTES}, not {min(self.num_bytes)}")
        for name, given, known in (("--call", self.calls, (UNARY, STREAM)), ("--over", self.over, (TCP, UNIX))):
            if not given or not set(given) <= set(known):
                raise ConfigError(name, f"should be {' or '.join(known)}, not {', '.join(given)}")


def run_plan(plan: WirePlan, *, on_done: Callable[[], None] = lambda: None) -> tuple[Series, ...]:
    """Time everything; one series a combination, in milliseconds."""
    return uvloop.run(_run(plan, on_done))


async def _run(plan: WirePlan, on_done: Callable[[], None]) -> tuple[Series, ...]:
    series: list[Series] = []
    with tempfile.TemporaryDirectory() as folder:
        for over in plan.over:
            listening = "127.0.0.1:0" if over == TCP else f"unix:{folder}/echo"
            async with child_process("-P", "-m", _ECHO, listening) as (address, _):
                for call in plan.calls:
                    for num_bytes in plan.num_bytes:
                        series.append(await _measure(address, plan, call, over, num_bytes))
                        on_done()
    return tuple(series)


async def _measure(address: str, plan: WirePlan, call: str, over: str, num_bytes: int) -> Series:
    reply_bytes = num_bytes if plan.reply_bytes is None else plan.reply_bytes
    request = make_request(num_bytes, reply_bytes)
    channel = open_channel(address, max_message_bytes=MAX_LINK_MESSAGE_BYTES)
    async with channel, _OPENERS[call](channel) as send:
        if await send(request) != reply_to(request):
            raise ProtocolError(f"the echo of {num_bytes} bytes is not what it must be")
        for _ in range(plan.num_warmups):
            await send(request)
        samples = [await _milliseconds(send, request) for _ in range(plan.num_samples)]
    labels: dict[str, Label] = {"call": call, "over": over, "num_bytes": num_bytes, "reply_bytes": reply_bytes}
    return Series("round_trip", "ms", tuple(samples), labels)


async def _milliseconds(send: Call, request: bytes) -> float:
    began = time.perf_counter()
    await send(request)
    return 1e3 * (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _unary(channel: grpc.aio.Channel) -> AsyncIterator[Call]:
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Unary")

    async def send(request: bytes) -> bytes:
        return await method(request)

    yield send


@contextlib.asynccontextmanager
async def _stream(channel: grpc.aio.Channel) -> AsyncIterator[Call]:
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/Stream")
    call = method()

    async def send(request: bytes) -> bytes:
        await call.write(request)
        reply = await call.read()
        if not isinstance(reply, bytes):
            raise ProtocolError("the echo process ended its stream")
        return reply

    yield send
    await call.done_writing()


_OPENERS: dict[str, Callable[[grpc.aio.Channel], contextlib.AbstractAsyncContextManager[Call]]] = {
    UNARY: _unary,
    STREAM: _stream,
}


def to_rows(series: tuple[Series, ...]) -> list[tuple[Label, Label, Label, Label, float, float]]:
    """(call, over, bytes there, bytes back, median ms, p99 ms) of each series."""
    keys = ("call", "over", "num_bytes", "reply_bytes")
    return [
        (*(item.labels[key] for key in keys), found.median, found.p99)  # type: ignore[misc]
        for item in series
        if (found := item.statistics) is not None
    ]


def to_result(series: tuple[Series, ...], plan: WirePlan, *, name: str) -> Result:
    """The result to save."""
    configuration: dict[str, Any] = {
        "num_samples": plan.num_samples,
        "num_warmups": plan.num_warmups,
        "event_loop": "uvloop",
        "python_implementation": platform.python_implementation(),
    }
    return Result(
        kind="rpc",
        name=name,
        created_at=now(),
        environment=describe_environment("cpu"),
        configuration=configuration,
        series=series,
    )
