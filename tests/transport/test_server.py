"""Servers: a port of their own, health, reflection, statuses, a graceful end."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider import AsyncClient
from outrider.cli.stack.held_ports import hold_port
from outrider.errors import CapacityError, ConfigError, InvalidRequestError, UnavailableError
from outrider.generation import TokenizerFiles
from outrider.transport import servicers, tokenizer_answers
from outrider.transport.convert.generation import tokenizer_to_proto
from outrider.transport.interceptor import ErrorInterceptor
from outrider.transport.server import serve_generation, serve_target
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows
from tests.transport.conftest import Serve

V = 5
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = {
    "draft": "outrider.v1.DraftService",
    "target": "outrider.v1.TargetService",
    "generation": "outrider.v1.GenerationService",
}


def service(role: str) -> Any:
    rows = random_rows(V)
    return {"draft": ToyDraft(rows, V), "target": ToyTarget(rows, V), "generation": ScriptedGenerator()}[role]


async def health_of(address: str, name: str) -> int:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=120)
    status: int = answer.status
    return status


async def test_a_port_in_use_is_a_clear_error(serve: Serve) -> None:
    server = await serve("target", service("target"))
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=server.address) as caught:
        await serve("draft", service("draft"), port=port)
    assert caught.value.field == "port"
    assert await health_of(server.address, NAMES["target"]) == SERVING


async def test_a_socket_in_use_is_a_clear_error(serve: Serve, tmp_path: Any) -> None:
    host = f"unix:{tmp_path / 'a.sock'}"
    await serve("target", service("target"), host=host)
    with pytest.raises(ConfigError, match=r"a\.sock"):
        await serve("draft", service("draft"), host=host)
    assert await health_of(host, NAMES["target"]) == SERVING


async def test_coordinators_that_say_so_share_a_port_and_the_kernel_spreads_connections() -> None:
    """Health tells them apart here: one of the two serves."""
    first = await serve_generation(ScriptedGenerator(), host="127.0.0.1", port=0, reuse_port=True)
    port = int(first.address.rpartition(":")[2])
    second = await serve_generation(ScriptedGenerator(), host="127.0.0.1", port=port, reuse_port=True)
    try:
        assert second.address == first.address
        await first.set_serving(True)
        heard = [await health_of(first.address, NAMES["generation"]) for _ in range(40)]
        assert set(heard) == {SERVING, NOT_SERVING}  # by chance they are all of one in 1 of 10^12 runs
        with pytest.raises(ConfigError, match="in use"):
            await serve_generation(ScriptedGenerator(), host="127.0.0.1", port=port)
        await second.stop()
        assert {await health_of(first.address, NAMES["generation"]) for _ in range(10)} == {SERVING}
    finally:
        await first.stop()
        await second.stop()


async def test_a_port_of_its_own_reaches_one_of_several_that_share_one() -> None:
    own = hold_port()
    first = await serve_generation(ScriptedGenerator(), host="127.0.0.1", port=0, reuse_port=True, own_port=own)
    port = int(first.address.rpartition(":")[2])
    second = await serve_generation(ScriptedGenerator(), host="127.0.0.1", port=port, reuse_port=True)
    try:
        await first.set_serving(True)
        assert {await health_of(f"127.0.0.1:{own}", NAMES["generation"]) for _ in range(20)} == {SERVING}
        with pytest.raises(ConfigError, match="own_port"):
            await serve_generation(ScriptedGenerator(), host="127.0.0.1", port=0, own_port=own)
    finally:
        await first.stop()
        await second.stop()


async def test_an_address_that_is_not_ours_is_a_clear_error(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await serve("draft", service("draft"), host="192.0.2.1", port=0)


async def test_health_can_be_watched(serve: Serve) -> None:
    server = await serve("target", service("target"))
    async with grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(240):
        seen = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAMES["target"]))
        assert (await seen.read()).status == SERVING
        await server.set_serving(False)
        assert (await seen.read()).status == NOT_SERVING
        seen.cancel()


async def test_calls_that_stay_open_are_bounded_in_number(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.transport.server.MAX_CALLS", 20)
    server = await serve("generation", ScriptedGenerator())
    async with grpc.aio.insecure_channel(server.address) as other, AsyncClient(server.address) as client:
        async with grpc.aio.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            calls = [watch(health_pb2.HealthCheckRequest(service=str(number))) for number in range(100)]
            ended = await asyncio.gather(*(_code_unless_open(call) for call in calls))
            assert 15 <= ended.count(None) <= 21
            assert set(ended) == {None, grpc.StatusCode.RESOURCE_EXHAUSTED}
            with pytest.raises(CapacityError):
                await client.generate(prompt="x", max_tokens=1, timeout=120)
        async with asyncio.timeout(240):
            while await _code_unless_open(health_pb2_grpc.HealthStub(other).Watch(health_pb2.HealthCheckRequest())):
                await asyncio.sleep(0.01)
        assert (await client.generate(prompt="x", max_tokens=1, timeout=120)).text == "<0>"


async def test_a_burst_of_calls_waits_and_none_is_cancelled(serve: Serve) -> None:
    """1,500 arrive before the event loop, which the caller shares, takes in the first."""
    server = await serve("generation", ScriptedGenerator())
    async with grpc.aio.insecure_channel(server.address) as channel:
        await channel.channel_ready()
        ask = GenerationServiceStub(channel).GetModelInfo
        calls = [ask(generation_pb2.GetModelInfoRequest()) for _ in range(1500)]
        codes = await asyncio.gather(*(call.code() for call in calls))
    assert set(codes) == {grpc.StatusCode.OK}


@pytest.mark.slow
async def test_calls_wait_for_an_event_loop_that_is_busy_for_long(serve: Serve) -> None:
    """gRPC cancels calls that wait for 30 s."""
    server = await serve("generation", ScriptedGenerator())
    with grpc.insecure_channel(server.address) as channel:
        grpc.channel_ready_future(channel).result(timeout=120)
        ask = GenerationServiceStub(channel).GetModelInfo
        calls = [ask.future(generation_pb2.GetModelInfoRequest()) for _ in range(20)]
        time.sleep(33)  # in the event loop
        async with asyncio.timeout(240):
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.01)
        assert {call.code() for call in calls} == {grpc.StatusCode.OK}


async def test_one_host_cannot_take_all_calls_and_is_told_its_health(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.transport.server.ErrorInterceptor", partial(ErrorInterceptor, 5))
    server = await serve("generation", ScriptedGenerator())
    channels = [grpc.aio.insecure_channel(server.address) for _ in range(3)]
    stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels]
    calls = [stubs[number % 3].Watch(health_pb2.HealthCheckRequest(service=str(number))) for number in range(8)]
    ended = await asyncio.gather(*(_code_unless_open(call) for call in calls))
    assert ended.count(None) == 5
    assert ended.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 3
    assert (await stubs[0].Check(health_pb2.HealthCheckRequest(service="liveness"))).status
    async with AsyncClient(server.address) as client:
        with pytest.raises(CapacityError, match="has 5 calls open here, as many as one host may"):
            await client.generate(prompt="x", max_tokens=1, timeout=120)
    for channel in channels:
        await channel.close()


async def test_unread_tokenizers_are_few_and_make_room_when_their_callers_leave(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_answers, "MAX_ANSWERS_PER_HOST", 2)
    made: list[object] = []
    to_proto = tokenizer_to_proto

    def counting(found: TokenizerFiles) -> generation_pb2.GetTokenizerResponse:
        made.append(found)
        return to_proto(found)

    monkeypatch.setattr(servicers, "tokenizer_to_proto", counting)
    generator = ScriptedGenerator()
    generator.tokenizer = TokenizerFiles({"tokenizer.json": b"x" * (8 << 20)}, 3, "hash")
    server = await serve("generation", generator)
    window = [("grpc.http2.bdp_probe", 0)]  # a measured one can grow to a whole answer
    async with grpc.aio.insecure_channel(server.address, window) as channel, AsyncClient(server.address) as client:
        ask: Any = channel.unary_stream("/outrider.v1.GenerationService/GetTokenizer")  # whose answer is not asked for
        calls = [ask(b"") for _ in range(6)]
        async with asyncio.timeout(240):
            while len(made) < 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(made) == 2
        for call in calls:
            call.cancel()
        for _ in range(3):  # those that are read leave, too
            assert (await client.tokenizer_files()).files["tokenizer.json"][:1] == b"x"


async def _code_unless_open(call: Any) -> grpc.StatusCode | None:
    """None when the call has brought its first message, else what it ended with."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


@pytest.mark.parametrize("role", NAMES)
async def test_health_is_by_name_and_liveness_follows_nothing(serve: Serve, role: str) -> None:
    server = await serve(role, service(role))
    for name in ("", NAMES[role], "liveness"):
        assert await health_of(server.address, name) == SERVING
    await server.set_serving(False)
    assert await health_of(server.address, "") == NOT_SERVING
    assert await health_of(server.address, NAMES[role]) == NOT_SERVING
    assert await health_of(server.address, "liveness") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(server.address, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_not_serving_until_said_so() -> None:
    server = await serve_target(service("target"), host="127.0.0.1", port=0)
    try:
        assert await health_of(server.address, "") == NOT_SERVING
        assert await health_of(server.address, NAMES["target"]) == NOT_SERVING
        assert await health_of(server.address, "liveness") == SERVING
    finally:
        await server.stop()


@pytest.mark.parametrize("role", NAMES)
async def test_reflection_lists_and_describes_the_service(serve: Serve, role: str) -> None:
    server = await serve(role, service(role))
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAMES[role]),
    ]
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked))
        listed, described = [answer async for answer in call]
    names = {found.name for found in listed.list_services_response.service}
    assert {NAMES[role], "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


async def call_generate(address: str, **fields: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = generation_pb2.GenerateRequest(prompt_text="x", **fields)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationServiceStub(channel).Generate(request, timeout=120)
    return caught.value


async def test_errors_of_handlers_are_statuses(serve: Serve) -> None:
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    generator.error = InvalidRequestError("top_k", "must be at least -1")
    error = await call_generate(server.address)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "top_k: must be at least -1"
    generator.error = UnavailableError("no target")
    assert (await call_generate(server.address)).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_bug_is_logged_and_its_insides_are_not_told(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    generator.error = ZeroDivisionError("the secret inside")
    with caplog.at_level(logging.ERROR):
        error = await call_generate(server.address)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert all(b"secret" not in value for _, value in error.trailing_metadata() if isinstance(value, bytes))
    record = next(record for record in caplog.records if record.exc_info)
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)
    assert "ZeroDivisionError" in caplog.text


async def test_a_generation_without_a_result_is_an_error(serve: Serve) -> None:
    generator = ScriptedGenerator()
    generator.forgets_result = True
    server = await serve("generation", generator)
    assert (await call_generate(server.address)).code() is grpc.StatusCode.INTERNAL


async def test_draining_lets_calls_finish_and_takes_no_new_ones(serve: Serve) -> None:
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    generator.stop_after = 1
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = GenerationServiceStub(channel).StreamGenerate(
            generation_pb2.GenerateRequest(prompt_text="x", max_tokens=2), timeout=120
        )
        assert (await call.read()).delta.token_ids == [0]
        draining = asyncio.create_task(server.drain(delay_s=600, grace_s=0))
        async with asyncio.timeout(240):
            while await health_of(server.address, "") == SERVING:  # still answered during the delay
                await asyncio.sleep(0.01)
        assert await health_of(server.address, "liveness") == SERVING
        await server.set_serving(True)
        assert await health_of(server.address, "") == NOT_SERVING
        draining.cancel()
        await server.drain(delay_s=0, grace_s=0.2)
        await generator.until(num_abandoned=1)  # it never finished, and the grace is over
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await server.wait()


async def test_draining_returns_as_soon_as_all_is_done(serve: Serve) -> None:
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    async with asyncio.timeout(240):
        await server.drain(delay_s=0, grace_s=1000)


async def test_a_huge_request_is_refused_and_the_next_is_served(serve: Serve) -> None:
    generator = ScriptedGenerator()
    server = await serve("generation", generator)
    error = await call_generate(server.address, bad_words=["x" * 9_000_000])
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert generator.requests == []
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = GenerationServiceStub(channel)
        answer = await stub.Generate(generation_pb2.GenerateRequest(prompt_text="x", max_tokens=1))
    assert answer.result.text == "<0>"


async def test_a_connection_past_its_age_is_renewed_and_what_runs_on_it_goes_on() -> None:
    generator = ScriptedGenerator()
    server = await serve_generation(generator, host="127.0.0.1", port=0, max_connection_age_s=0.2)
    generator.stop_after = 1
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = GenerationServiceStub(channel)
            running = stub.StreamGenerate(generation_pb2.GenerateRequest(prompt_text="x", max_tokens=2), timeout=60)
            assert (await running.read()).delta.token_ids == [0]
            async with asyncio.timeout(120):
                while channel.get_state() is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert generator.num_abandoned == 0
            assert (await stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=120)).target_model
            running.cancel()
    finally:
        await server.stop()
