"""Requests that are being read by a coordinator: their bytes in all, and what is held of them while they are served."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from outrider.chat import ChatPrompt
from outrider.errors import CapacityError, InvalidRequestError
from outrider.generation import Delta, GenerationRequest
from outrider.open_requests import OpenRequests
from outrider.transport.arrivals import MAX_READ_AT_ONCE, MAX_SLOW_PER_HOST, Arrivals
from outrider.transport.channels import MAX_REQUEST_BYTES
from outrider.transport.convert.chat import chat_to_proto
from outrider.transport.server import serve_generation
from outrider.transport.status import from_rpc_error
from outrider.v1 import generation_pb2 as pb
from outrider_coordinator.requests.output_collector import OutputCollector
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

SERVICE = "/outrider.v1.GenerationService"
LARGE = 1_900_000
PEER = "ipv4:10.0.0.1:4711"


class Reading(ScriptedGenerator):
    """Takes each request in after so many deltas; None: never."""

    taken_in_after: int | None = None

    async def generate_stream(
        self,
        request: GenerationRequest,
        *,
        deadline_s: float | None = None,
        on_taken_in: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Delta, None]:
        async with contextlib.aclosing(super().generate_stream(request, deadline_s=deadline_s)) as deltas:
            if self.taken_in_after == 0:
                on_taken_in()
            async for delta in deltas:
                yield delta


@contextlib.asynccontextmanager
async def served(generator: ScriptedGenerator, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    server = await serve_generation(generator, host="127.0.0.1", port=0, **options)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop()


def begin(channel: grpc.aio.Channel, num_characters: int) -> Any:
    request = pb.GenerateRequest(prompt_text="x" * num_characters, max_tokens=4)
    multi: Any = channel.unary_stream(
        f"{SERVICE}/StreamGenerate", response_deserializer=pb.StreamGenerateResponse.FromString
    )
    return multi(request.SerializeToString(), timeout=120)


async def answered(channel: grpc.aio.Channel, num_characters: int) -> None:
    call = begin(channel, num_characters)
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
        if await call.code() is grpc.StatusCode.OK:
            return
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "here") from None
    raise AssertionError(await call.details())


async def test_more_bytes_than_may_be_read_are_refused_and_small_requests_are_not() -> None:
    generator = Reading()
    generator.stop_after = 1
    async with served(generator, max_open_request_bytes=200_000) as channel:
        first = begin(channel, 150_000)
        await first.read()
        with pytest.raises(CapacityError, match=r"max_open_request_bytes") as refused:
            await answered(channel, 30_000)
        assert refused.value.retry_after_ms > 0
        generator.stop_after = None
        await answered(channel, 1000)
        first.cancel()
        await generator.until(num_abandoned=1)
        await answered(channel, 150_000)


async def test_what_is_tokenized_counts_no_more() -> None:
    generator = Reading()
    generator.stop_after, generator.taken_in_after = 1, 0
    async with served(generator, max_open_request_bytes=200_000) as channel:
        calls = []
        for _ in range(4):
            calls.append(begin(channel, 150_000))
            assert (await calls[-1].read()).delta.text
        for call in calls:
            call.cancel()


class Calls:
    """Calls whose messages arrive when they are told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_arrive = asyncio.Event()

    async def requests(self, num_characters: int) -> AsyncGenerator[pb.GenerateRequest, None]:
        self.num_asked += 1
        await self.may_arrive.wait()
        yield pb.GenerateRequest(prompt_text="x" * num_characters)


async def test_few_messages_are_asked_for_at_the_same_time() -> None:
    arrivals, all_bytes, calls = Arrivals(), OpenRequests(), Calls()

    async def receive() -> None:
        with all_bytes.entered() as held:
            await arrivals.receive(calls.requests(50), held, PEER)
            assert 50 < all_bytes.num_bytes < 100

    receiving = [asyncio.create_task(receive()) for _ in range(3 * MAX_READ_AT_ONCE)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert calls.num_asked == MAX_READ_AT_ONCE
    receiving[0].cancel()
    calls.may_arrive.set()
    await asyncio.gather(*receiving[1:])
    assert calls.num_asked == 3 * MAX_READ_AT_ONCE
    assert all_bytes.num_bytes == 0


async def test_a_slow_message_gives_its_turn_away_and_counts_as_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.transport.arrivals.SLOW_S", 0.01)
    arrivals, all_bytes, calls = Arrivals(), OpenRequests(2 * MAX_REQUEST_BYTES), Calls()

    async def receive() -> None:
        with all_bytes.entered() as held:
            await arrivals.receive(calls.requests(50), held, PEER)

    found = await asyncio.gather(*(receive() for _ in range(2)), _when_slow(calls, all_bytes), return_exceptions=True)
    assert [type(one) for one in found] == [type(None), CapacityError, type(None)]

    monkeypatch.setattr("outrider.transport.arrivals.ARRIVAL_TIMEOUT_S", 0.01)
    calls.may_arrive.clear()
    with pytest.raises(InvalidRequestError, match="has not arrived"):
        await receive()
    assert all_bytes.num_bytes == 0


@pytest.mark.parametrize("num_steps", range(6))
async def test_a_call_cancelled_as_its_slow_message_arrives_stays_cancelled(
    monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """``asyncio.wait_for`` of Python 3.11 returns the message instead."""
    monkeypatch.setattr("outrider.transport.arrivals.SLOW_S", 0.01)
    arrivals, all_bytes, calls = Arrivals(), OpenRequests(), Calls()

    async def receive() -> None:
        with all_bytes.entered() as held:
            await arrivals.receive(calls.requests(50), held, PEER)

    receiving = asyncio.create_task(receive())
    await _when_slow(calls, all_bytes)
    for _ in range(num_steps):
        await asyncio.sleep(0)
    was_open = receiving.cancel()
    await asyncio.wait([receiving])
    assert receiving.cancelled() == was_open
    assert all_bytes.num_bytes == 0


async def test_calls_that_send_nothing_hold_others_up_for_a_short_time_each() -> None:
    arrivals, all_bytes, mute, prompt = Arrivals(), OpenRequests(), Calls(), Calls()
    prompt.may_arrive.set()

    async def receive(calls: Calls) -> None:
        with all_bytes.entered() as held:
            await arrivals.receive(calls.requests(50), held, PEER)

    holding = [asyncio.create_task(receive(mute)) for _ in range(10 * MAX_READ_AT_ONCE)]
    await asyncio.sleep(0)
    async with asyncio.timeout(9):  # of 10 s, at 1 s each
        await receive(prompt)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    assert all_bytes.num_bytes == 0


async def test_calls_of_one_host_that_send_nothing_leave_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.transport.arrivals.SLOW_S", 0.01)
    arrivals, all_bytes, mute, prompt = Arrivals(), OpenRequests(), Calls(), Calls()
    prompt.may_arrive.set()

    async def receive(calls: Calls, num_characters: int) -> None:
        with all_bytes.entered() as held:
            await arrivals.receive(calls.requests(num_characters), held, PEER)

    holding = [asyncio.create_task(receive(mute, 50)) for _ in range(MAX_READ_AT_ONCE)]
    async with asyncio.timeout(240):
        ended, _ = await asyncio.wait(holding[MAX_SLOW_PER_HOST:])
    assert {type(task.exception()) for task in ended} == {CapacityError}
    assert all_bytes.num_bytes == MAX_SLOW_PER_HOST * MAX_REQUEST_BYTES
    await receive(prompt, 7_000_000)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    assert all_bytes.num_bytes == 0


async def _when_slow(calls: Calls, all_bytes: OpenRequests) -> None:
    async with asyncio.timeout(240):
        while all_bytes.num_bytes < MAX_REQUEST_BYTES:
            await asyncio.sleep(0.01)
    calls.may_arrive.set()


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_a_call_that_sends_no_request_is_told_so(method: str) -> None:
    async with served(ScriptedGenerator()) as channel:
        call: Any = channel.stream_stream(f"{SERVICE}/{method}")(timeout=120)
        await call.done_writing()
        with pytest.raises(InvalidRequestError, match="request: must be sent"):
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
                raise AssertionError(await call.details())
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, "here") from None


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_nothing_is_held_of_a_chat_that_its_template_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    folder = shutil.copytree(cached_tiny_model("llama", seed=1), tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("hidden")
    content, has_begun = hidden_chat(), asyncio.Event()

    async def wait_for_output(collector: OutputCollector) -> AsyncGenerator[Delta, None]:
        has_begun.set()
        await asyncio.Event().wait()
        yield Delta("", ())

    async with contextlib.AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(run_stack(folder, wire=True))
        channel = await cleanup.enter_async_context(grpc.aio.insecure_channel(stack.addresses["coordinator"]))
        await answered(channel, 1)
        monkeypatch.setattr(OutputCollector, "deltas", wait_for_output)
        tracemalloc.start(1)
        cleanup.callback(tracemalloc.stop)
        multi: Any = channel.unary_stream(f"{SERVICE}/{method}")
        call = multi(content)
        async with asyncio.timeout(240):
            await has_begun.wait()
        async with asyncio.timeout(240):  # the thread that rendered it may be the last to let go
            while tracemalloc.get_traced_memory()[0] > LARGE / 2:
                await asyncio.sleep(0.01)
        call.cancel()


def hidden_chat() -> bytes:
    """A request of three long texts."""
    entry = {"role": "user", "content": "x" * LARGE}
    request = pb.GenerateRequest(ignore_eos=True)
    request.chat.CopyFrom(chat_to_proto(ChatPrompt((entry,), (entry,), (entry,))))
    return request.SerializeToString()
