"""The public service on the wire: deltas and one result, and a generation that ends whenever its call does."""

from __future__ import annotations

import asyncio
import gc
import json
from types import AsyncGeneratorType, FrameType
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider import AsyncClient
from outrider.errors import CapacityError, InvalidRequestError, ProtocolError
from outrider.generation import Delta, GenerationRequest
from outrider.transport.channels import FIXED_WINDOW
from outrider.transport.remote_generation import RemoteGeneration
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.scripted_generator import INFO, ScriptedGenerator
from tests.support.scripted_ports import ToyDraft, random_rows
from tests.transport.conftest import Serve


def asked(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(prompt_text="x", **fields)


async def test_deltas_then_exactly_one_result(serve: Serve) -> None:
    server = await serve("generation", ScriptedGenerator())
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = GenerationServiceStub(channel).StreamGenerate(asked(max_tokens=3, logprobs=1))
        kinds = [message.WhichOneof("event") async for message in call]
    assert kinds == ["delta"] * 3 + ["result"]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_in_process_and_over_grpc_give_equal_deltas(serve: Serve, logprobs: int | None) -> None:
    """Result over the wire comes as a delta of its own; joined they are the same."""
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    remote = RemoteGeneration(server.address)
    request = GenerationRequest(prompt="x", max_tokens=4, seed=5, logprobs=logprobs, request_id="r")
    here = [delta async for delta in generator.generate_stream(request)]
    there = [delta async for delta in remote.stream(request, timeout_s=120)]
    assert there[-1] == Delta("", (), None if logprobs is None else (), here[-1].result)
    assert there[:-1] == [*here[:-1], Delta(here[-1].text, here[-1].token_ids, here[-1].logprobs)]
    assert await remote.generate(request, timeout_s=120) == here[-1].result
    assert await remote.model_info() == INFO
    assert generator.requests == [request] * 3
    await remote.close()


async def test_each_delta_is_there_before_the_next_is_made(serve: Serve) -> None:
    generator = ScriptedGenerator()
    generator.stop_after = 2
    server = await serve("generation", generator)
    remote = RemoteGeneration(server.address)
    stream = remote.stream(GenerationRequest(prompt="x", max_tokens=5), timeout_s=120)
    assert [(await anext(stream)).token_ids, (await anext(stream)).token_ids] == [(0,), (1,)]
    await stream.aclose()
    await generator.until(num_abandoned=1)
    await remote.close()


@pytest.mark.parametrize("rpc", ["Generate", "StreamGenerate"])
async def test_a_cancelled_call_closes_the_generation(serve: Serve, rpc: str) -> None:
    generator = ScriptedGenerator()
    generator.stop_after = 1
    server = await serve("generation", generator)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = getattr(GenerationServiceStub(channel), rpc)(asked(max_tokens=9))
        await call.wait_for_connection() if rpc == "StreamGenerate" else None
        await generator.until(num_emitted=1)
        call.cancel()
        await generator.until(num_abandoned=1)


async def test_a_reader_that_stops_reading_holds_up_its_generation_and_can_still_be_cancelled(serve: Serve) -> None:
    """Flow control reaches the generator: what nobody reads is not made without end."""
    generator = ScriptedGenerator(piece_size=100_000)
    server = await serve("generation", generator)
    async with grpc.aio.insecure_channel(server.address, FIXED_WINDOW) as channel:
        call = GenerationServiceStub(channel).StreamGenerate(asked(max_tokens=10_000))
        await call.read()
        before = -1
        while before != generator.num_emitted:  # until it makes no more
            before = generator.num_emitted
            await asyncio.sleep(0.1)
        assert generator.num_emitted < 1_000
        call.cancel()
        await generator.until(num_abandoned=1)


async def test_a_client_that_vanishes_closes_the_generation(serve: Serve) -> None:
    generator = ScriptedGenerator()
    generator.stop_after = 1
    server = await serve("generation", generator)
    channel = grpc.aio.insecure_channel(server.address)
    call = GenerationServiceStub(channel).StreamGenerate(asked(max_tokens=9))
    await call.read()
    await channel.close()
    await generator.until(num_abandoned=1)


async def test_a_deadline_reaches_the_generator_and_ends_it(serve: Serve) -> None:
    generator = ScriptedGenerator()
    generator.stop_after = 1
    server = await serve("generation", generator)
    async with grpc.aio.insecure_channel(server.address) as channel:
        await channel.channel_ready()
        timeout = 1.0
        while not generator.deadlines:  # a busy host may not take it in before a short one
            timeout *= 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await GenerationServiceStub(channel).Generate(asked(max_tokens=9), timeout=timeout)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await generator.until(num_abandoned=generator.num_asked)
    assert all(deadline is not None and deadline < timeout + 1 for deadline in generator.deadlines)


async def test_without_a_deadline_there_is_none(serve: Serve) -> None:
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    async with grpc.aio.insecure_channel(server.address) as channel:
        await GenerationServiceStub(channel).Generate(asked(max_tokens=1))
    assert generator.deadlines == [None]


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize("error", [None, CapacityError("full")], ids=["bound", "refused"])
async def test_a_request_that_failed_is_let_go_at_once(serve: Serve, method: str, error: Exception | None) -> None:
    """Request that may hold megabytes; the collector runs much later."""
    generator = ScriptedGenerator()
    generator.error = error
    server = await serve("generation", generator)
    request = asked() if error else asked(stop=["x"] * 65)
    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = getattr(GenerationServiceStub(channel), method)(request)
            assert await call.code() is not grpc.StatusCode.OK
            del call
        async with asyncio.timeout(240):  # the server may end its call after the client
            while _frames_with_copies_of(request):
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


def _frames_with_copies_of(request: object) -> list[str]:
    frames = [found for found in gc.get_objects() if isinstance(found, FrameType)]
    return [
        frame.f_code.co_qualname
        for frame in frames
        if any(value is not request and value == request for value in frame.f_locals.values())
    ]


async def test_the_message_of_a_long_request_is_let_go_before_its_stream_runs(serve: Serve) -> None:
    """Message whose ids take four times their bytes, which gRPC keeps until the call ends."""
    generator = ScriptedGenerator()
    generator.stop_after = 1
    server = await serve("generation", generator)
    async with grpc.aio.insecure_channel(server.address) as channel:
        long = generation_pb2.GenerateRequest(prompt_text="x" * 100_000)
        call = GenerationServiceStub(channel).StreamGenerate(long)
        await call.read()
        running = [found.ag_frame for found in gc.get_objects() if isinstance(found, AsyncGeneratorType)]
        held = [
            frame.f_code.co_qualname
            for frame in running
            if frame is not None
            and any(isinstance(value, generation_pb2.GenerateRequest) for value in frame.f_locals.values())
        ]
        call.cancel()
    assert len(generator.requests) == 1
    assert held == []


async def test_an_error_does_not_hold_the_text_that_it_came_from(serve: Serve) -> None:
    """Errors of JSON do so."""
    error, cause = InvalidRequestError("tools", "is no JSON"), json.JSONDecodeError("no", "[" * 1000, 0)
    error.__cause__ = cause
    generator = ScriptedGenerator()
    generator.error = error
    server = await serve("generation", generator)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = GenerationServiceStub(channel).Generate(asked())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    held: list[Any] = [error.__cause__, error.__context__, error.__traceback__]
    assert held == [None] * 3


@pytest.mark.parametrize("resume", [False, True])
async def test_an_address_of_another_service_is_passed_over(serve: Serve, resume: bool) -> None:
    draft = await serve("draft", ToyDraft(random_rows(9, seed=1), 9))
    coordinator = await serve("generation", ScriptedGenerator())
    async with AsyncClient(draft.address, coordinator.address) as client, asyncio.timeout(120):
        assert (await client.generate(prompt="x", max_tokens=1, resume=resume)).token_ids
        assert await client.model_info() == INFO
    async with AsyncClient(draft.address) as client, asyncio.timeout(120):
        with pytest.raises(ProtocolError, match="UNIMPLEMENTED"):
            await client.generate(prompt="x", max_tokens=1, resume=resume, resume_timeout=3600)
