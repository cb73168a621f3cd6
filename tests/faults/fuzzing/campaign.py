"""A campaign: so many messages to every method of every server, and what they were answered.

A status of UNKNOWN or INTERNAL is a finding, since it says that the server met something it was not written for. A call
that does not end is one too. Everything else is an answer.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from outrider.transport.link.versions import METADATA as VERSION
from outrider.v1 import generation_pb2, link_pb2
from tests.faults.fuzzing import oversized, templates
from tests.faults.fuzzing.mutation import Mutator

FINDINGS = {"UNKNOWN", "INTERNAL", "HUNG"}
_HANG_S = 240.0
"""Time without an answer after which a call counts as hung."""
_GENERATION_S = 4.0
_WATCH_S = 0.2
"""Time after which a call that may run for long, or never ends, is cancelled."""
_OUR_OWN = "Internal error from Core"
"""Message of our own gRPC about a call that the server ended while a message was being written."""
_WORKERS = 6
_OVERSIZED_EVERY = 400
_MAX_MESSAGE_BYTES = 16 << 20
_KEPT_CALLS = 40

Script = Callable[[random.Random], list[Message]]


def _one(make: Callable[[random.Random], Message]) -> Script:
    return lambda rng: [make(rng)]


@dataclass(frozen=True, slots=True)
class Method:
    """One method of one server."""

    role: str
    path: str
    script: Script
    is_request_streamed: bool = False
    is_response_streamed: bool = False
    weight: int = 1
    leaves_after_s: float | None = None
    """Time after which the caller goes away; None for a call that has to end by itself."""


_PUBLIC = "/outrider.v1.GenerationService"
METHODS = (
    Method(
        "coordinator", f"{_PUBLIC}/Generate", _one(templates.public_request), weight=8, leaves_after_s=_GENERATION_S
    ),
    Method(
        "coordinator",
        f"{_PUBLIC}/StreamGenerate",
        _one(templates.public_request),
        is_response_streamed=True,
        weight=8,
        leaves_after_s=_GENERATION_S,
    ),
    Method("coordinator", f"{_PUBLIC}/GetModelInfo", _one(lambda rng: generation_pb2.GetModelInfoRequest())),
    Method("coordinator", f"{_PUBLIC}/GetTokenizer", _one(lambda rng: generation_pb2.GetTokenizerRequest())),
    Method("target", "/outrider.v1.TargetService/Describe", _one(lambda rng: link_pb2.DescribeRequest())),
    Method("target", "/outrider.v1.TargetService/Attach", templates.target_script, True, True, weight=8),
    Method("target", "/outrider.v1.TargetService/OpenChannel", templates.channel_script, True, True, weight=2),
    Method("draft", "/outrider.v1.DraftService/Describe", _one(lambda rng: link_pb2.DescribeRequest())),
    Method("draft", "/outrider.v1.DraftService/Attach", templates.draft_script, True, True, weight=8),
    *(
        method
        for role in ("coordinator", "target", "draft")
        for method in (
            Method(role, "/grpc.health.v1.Health/Check", _one(lambda rng: health_pb2.HealthCheckRequest(service="x"))),
            Method(
                role,
                "/grpc.health.v1.Health/Watch",
                _one(lambda rng: health_pb2.HealthCheckRequest()),
                is_response_streamed=True,
                leaves_after_s=_WATCH_S,
            ),
            Method(
                role,
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                _one(lambda rng: reflection_pb2.ServerReflectionRequest(list_services="")),
                True,
                True,
            ),
            Method(role, "/outrider.v1.NoService/NoMethod", _one(lambda rng: link_pb2.DescribeRequest())),
        )
    ),
)


@dataclass(slots=True)
class Outcome:
    """Results of a campaign so far."""

    num_messages: int = 0
    num_oversized: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    """Number of statuses by method and status."""
    findings: list[str] = field(default_factory=list)
    slowest: list[tuple[float, float, str]] = field(default_factory=list)
    """Calls that took longest: seconds, the monotonic clock at their end, and the answer. For the cause of a gap."""


class Campaign:
    """Messages drawn from a seed, sent by some workers at a time."""

    def __init__(self, addresses: dict[str, str], seed: int, num_messages: int) -> None:
        self.outcome = Outcome()
        self._addresses, self._num_messages = addresses, num_messages
        self._rng = random.Random(seed)

    async def run(self) -> None:
        """Send them all."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_WORKERS):
                group.create_task(self._work(random.Random(self._rng.getrandbits(64))))

    async def _work(self, rng: random.Random) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES)]
        channels = {role: grpc.aio.insecure_channel(at, options=options) for role, at in self._addresses.items()}
        methods = [method for method in METHODS if method.role in channels]
        weights = [method.weight for method in methods]
        try:
            while self.outcome.num_messages < self._num_messages:
                if rng.random() < 1 / _OVERSIZED_EVERY:
                    await self._send_oversized(channels["coordinator"], rng)
                else:
                    method = rng.choices(methods, weights)[0]
                    await self._send(channels[method.role], method, _fuzzed(rng, method))
        finally:
            for channel in channels.values():
                await channel.close()

    async def _send_oversized(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        what, content = oversized.draw(rng)
        self.outcome.num_oversized += 1
        await self._send(channel, METHODS[rng.randrange(2)], [content], what)

    async def _send(self, channel: grpc.aio.Channel, method: Method, contents: Sequence[bytes], what: str = "") -> None:
        self.outcome.num_messages += len(contents)
        began = time.monotonic()
        name, details = await _call(channel, method, contents)
        ended, answer = time.monotonic(), f"{method.role}{method.path} {name}"
        if method.leaves_after_s is None or what:
            self._note_time(ended - began, ended, f"{answer} {what}".strip())
        self.outcome.statuses[answer] = self.outcome.statuses.get(answer, 0) + 1
        if name in FINDINGS:
            sent = what or " ".join(content[:300].hex() for content in contents)
            self.outcome.findings.append(f"{answer}: {details[:300]} for {sent}")

    def _note_time(self, seconds: float, ended: float, answer: str) -> None:
        heapq.heappush(self.outcome.slowest, (seconds, ended, answer))
        while len(self.outcome.slowest) > _KEPT_CALLS:
            heapq.heappop(self.outcome.slowest)


def _fuzzed(rng: random.Random, method: Method) -> list[bytes]:
    """The method's script, some of its messages changed; now and then one that is no message at all."""
    mutator, contents = Mutator(rng), []
    for message in method.script(rng):
        if rng.random() < 0.5:
            mutator.mutate(message, rng.choice((1, 1, 2, 4)))
        content = message.SerializeToString()
        contents.append(mutator.spoil(content) if rng.random() < 0.1 else content)
    return contents


async def _call(channel: grpc.aio.Channel, method: Method, contents: Sequence[bytes]) -> tuple[str, str]:
    """The status of one call, read to its end or left; HUNG when it should have ended."""
    call = _begin(channel, method, contents)
    try:
        async with asyncio.timeout(method.leaves_after_s or _HANG_S):
            await _read(call, method)
    except TimeoutError:
        call.cancel()
        return ("HUNG", f"no end after {_HANG_S:.0f} s") if method.leaves_after_s is None else ("LEFT", "")
    except grpc.aio.AioRpcError as error:
        details = str(error.details())
        return ("ENDED WHILE WRITING", "") if details == _OUR_OWN else (error.code().name, details)
    return "OK", ""


def _begin(channel: grpc.aio.Channel, method: Method, contents: Sequence[bytes]) -> Any:
    async def sent() -> AsyncIterator[bytes]:
        for content in contents:
            yield content

    kind = (
        f"{'stream' if method.is_request_streamed else 'unary'}_{'stream' if method.is_response_streamed else 'unary'}"
    )
    # Neither serializer nor deserializer: bytes go and come as they are.
    begin: Callable[..., Any] = getattr(channel, kind)(method.path)
    return begin(sent() if method.is_request_streamed else contents[0], metadata=[VERSION])


async def _read(call: Any, method: Method) -> None:
    if method.is_response_streamed:
        async for _ in call:
            pass
    else:
        await call
