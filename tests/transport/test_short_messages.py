"""Methods of one short message: few messages are asked for at the same time, and calls that send none are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from outrider.errors import CapacityError
from outrider.transport.channels import MAX_COMMANDS_BYTES, message_limits
from outrider.transport.short_messages import MAX_READ_AT_ONCE, ShortMessages
from tests.support.scripted_ports import ToyDraft, random_rows
from tests.transport.conftest import Serve

PEER = "ipv4:10.0.0.1:4711"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Mute:
    """Streams without a message that tell how many are being read."""

    def __init__(self) -> None:
        self.num_read = self.most_read = 0

    async def requests(self) -> AsyncGenerator[Any, None]:
        self.num_read += 1
        self.most_read = max(self.num_read, self.most_read)
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.num_read -= 1


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.transport.short_messages.BUSY_S", 0.01)
    monkeypatch.setattr("outrider.transport.short_messages.ARRIVAL_TIMEOUT_S", 0.2)


async def _all_of(receive: AsyncGenerator[Any, None]) -> list[Any]:
    return [message async for message in receive]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_few_messages_are_asked_for_at_the_same_time(is_stream: bool) -> None:
    messages, mute = ShortMessages(), Mute()

    def receive() -> Any:
        return _all_of(messages.each(mute.requests(), PEER)) if is_stream else messages.only(mute.requests(), PEER)

    async with asyncio.timeout(240):
        ended = await asyncio.gather(*(receive() for _ in range(5 * MAX_READ_AT_ONCE)), return_exceptions=True)
    assert mute.most_read == MAX_READ_AT_ONCE
    assert mute.num_read == 0
    assert all(end == [] if is_stream else isinstance(end, CapacityError) for end in ended)


async def _nothing(has_ended: asyncio.Event) -> AsyncIterator[bytes]:
    await has_ended.wait()
    for _ in ():
        yield b""


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/outrider.v1.DraftService/Describe", REFLECTION])
async def test_calls_that_send_no_message_end_and_a_probe_is_answered_meanwhile(serve: Serve, method: str) -> None:
    server = await serve("draft", ToyDraft(random_rows(9, seed=1), 9))
    has_ended = asyncio.Event()
    async with grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(240):
        mute: Callable[..., Any] = channel.stream_stream(method)
        calls = [mute(_nothing(has_ended)) for _ in range(5 * MAX_READ_AT_ONCE)]
        for _ in range(5):
            assert (await HealthStub(channel).Check(HealthCheckRequest())).status
        codes = {await call.code() for call in calls}
        assert codes == {grpc.StatusCode.OK if method == REFLECTION else grpc.StatusCode.RESOURCE_EXHAUSTED}
        has_ended.set()


async def test_reflection_answers_one_message_after_the_other(serve: Serve) -> None:
    server = await serve("draft", ToyDraft(random_rows(9, seed=1), 9))
    async with grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(240):
        multi: Any = channel.stream_stream(
            REFLECTION,
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )
        call = multi()
        for _ in range(3):
            await call.write(ServerReflectionRequest(list_services=""))
            answer = await call.read()
            assert "outrider.v1.DraftService" in [found.name for found in answer.list_services_response.service]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_watcher_of_health_is_told_of_changes(serve: Serve) -> None:
    server = await serve("draft", ToyDraft(random_rows(9, seed=1), 9))
    async with grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(240):
        call = HealthStub(channel).Watch(HealthCheckRequest())
        told = []
        for serving in (False, True):
            await server.set_serving(serving)
            told.append((await call.read()).status)
        assert told[-1] == HealthCheckResponse.SERVING


async def test_a_service_takes_no_message_longer_than_commands_may_be(serve: Serve) -> None:
    server = await serve("draft", ToyDraft(random_rows(9, seed=1), 9))
    async with grpc.aio.insecure_channel(server.address, options=message_limits(-1)) as channel:
        describe: Any = channel.unary_unary("/outrider.v1.DraftService/Describe")
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
            await describe(bytes(MAX_COMMANDS_BYTES + 1), timeout=120)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
