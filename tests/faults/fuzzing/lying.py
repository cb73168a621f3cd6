"""Services that lie: a proxy before an honest draft or target that changes its answers on their way.

The coordinator speaks to the proxy as to any service. A lie is a changed field, bytes that are no message, an answer
twice, late, of another session, of an earlier step or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from outrider.v1 import link_pb2
from tests.faults.fuzzing.mutation import Mutator

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_OWN_METADATA = ("grpc-", "user-agent", ":", "te", "content-type")
_KEPT = 8
"""Earlier answers that may be sent again."""
_LATE_S = 0.05
_KINDS = ("field", "field", "field", "spoil", "twice", "earlier", "swap", "late", "drop")
_EVENTS: dict[str, tuple[Any, Any]] = {
    "target": (link_pb2.TargetEvents, link_pb2.TargetCommands),
    "draft": (link_pb2.DraftEvents, link_pb2.DraftCommands),
}


class Liar:
    """Answers of one service, changed at random. ``share``: of the messages that are lies."""

    def __init__(self, role: str, seed: int, *, share: float, drops: bool = False) -> None:
        self.num_answers = 0
        """Items of all messages that were sent on, honest ones included."""
        self.num_lies = 0
        self.seen_requests: set[str] = set()
        """Ids of the requests that sent an ``Open`` to this service."""
        self._event, self._command = _EVENTS[role]
        self._rng, self._share, self._drops = random.Random(seed), share, drops
        self._mutator = Mutator(self._rng)
        self._earlier: list[bytes] = []
        self._num_described = 0

    def hear(self, content: bytes) -> None:
        """Note the requests that a message of the coordinator opens."""
        with contextlib.suppress(Exception):
            commands = self._command.FromString(content).commands
            self.seen_requests |= {each.open.request_id for each in commands if each.HasField("open")}

    def describe(self, content: bytes) -> bytes:
        """The description in place of an honest one; the first is honest, since the coordinator starts by it."""
        is_honest = not self._num_described or self._rng.random() >= self._share
        self._num_described += 1
        if is_honest:
            return content
        self.num_lies += 1
        message = link_pb2.ModelDescription.FromString(content)
        self._mutator.mutate(message, self._rng.choice((1, 1, 2, 4)))
        return message.SerializeToString()

    async def answer(self, content: bytes) -> list[bytes]:
        """The messages in place of an honest one."""
        message = self._event.FromString(content)
        rows = [len(each.answers.sessions) // 8 for each in message.events if each.HasField("answers")]
        self.num_answers += max(1, len(message.events) - len(rows) + sum(rows))
        is_honest = self._rng.random() >= self._share
        if message.HasField("heartbeat"):
            return [content if is_honest else self._lie_of_state(message)]
        if is_honest:
            self._earlier = [*self._earlier[1 - _KEPT :], content]
            return [content]
        self.num_lies += 1
        return await self._lie(message, content)

    def _lie_of_state(self, message: Any) -> bytes:
        """A heartbeat with other numbers of pages, messages and times."""
        self.num_lies += 1
        self._mutator.mutate(message.heartbeat)
        return bytes(message.SerializeToString())

    async def _lie(self, message: Any, content: bytes) -> list[bytes]:
        kind = self._rng.choice(_KINDS)
        if kind == "spoil":
            return [self._mutator.spoil(content)] if self._rng.random() < 0.1 else [content]
        if kind == "twice":
            return [content, content]
        if kind == "earlier":
            return [content, *self._rng.choices(self._earlier, k=2)] if self._earlier else [content]
        if kind == "late":
            await asyncio.sleep(self._rng.random() * _LATE_S)
            return [content]
        if kind == "drop":
            return [] if self._drops else [content]
        if kind == "swap":
            self._swap(message)
        else:
            self._mutator.mutate(message, self._rng.choice((1, 1, 2, 4)))
        return [message.SerializeToString()]

    def _swap(self, message: Any) -> None:
        """Give the answers of this message to each other's sessions."""
        for each in message.events:
            if each.HasField("answers"):
                each.answers.sessions = self._shuffled(each.answers.sessions)
        items = [getattr(each, each.WhichOneof("event")) for each in message.events if each.WhichOneof("event")]
        items = [item for item in items if "session" in item.DESCRIPTOR.fields_by_name]
        sessions = [item.session for item in items]
        self._rng.shuffle(sessions)
        for item, session in zip(items, sessions, strict=True):
            item.session = session if self._rng.random() < 0.8 else self._rng.randrange(100)

    def _shuffled(self, sessions: bytes) -> bytes:
        rows = [sessions[start : start + 8] for start in range(0, len(sessions), 8)]
        self._rng.shuffle(rows)
        if rows and self._rng.random() < 0.4:
            rows[0] = self._rng.randrange(100).to_bytes(8, "little")
        return b"".join(rows)


class LyingProxy:
    """A server before an honest service, whose links go through a liar."""

    def __init__(self, honest: str, liar: Liar) -> None:
        self._honest, self.liar = honest, liar
        self.address = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LyingProxy]:
        """Serving until the end of the block."""
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_Handler(self),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self.channel = grpc.aio.insecure_channel(
            self._honest, options=[*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        )
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)
            await self.channel.close()

    async def pass_on(self, path: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """One call; every call is a stream of messages on the wire."""
        is_link = path.endswith("/Attach")

        async def heard() -> AsyncIterator[bytes]:
            async for content in requests:
                if is_link:
                    self.liar.hear(content)
                yield content

        metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith(_OWN_METADATA)]
        begin: Any = self.channel.stream_stream(path)
        call = begin(heard(), metadata=metadata)
        try:
            async for content in call:
                for each in await self._changed(path, content):
                    yield each
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", error.trailing_metadata())
        finally:
            call.cancel()

    async def _changed(self, path: str, content: bytes) -> Sequence[bytes]:
        if path.endswith("/Attach"):
            return await self.liar.answer(content)
        return (self.liar.describe(content) if path.endswith("/Describe") else content,)


class _Handler(grpc.GenericRpcHandler):
    """Takes every method."""

    def __init__(self, proxy: LyingProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method

        async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for content in self._proxy.pass_on(path, requests, context):
                yield content

        return grpc.stream_stream_rpc_method_handler(handle)
