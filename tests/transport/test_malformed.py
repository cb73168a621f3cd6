"""Bytes that are no message, or break a link's contract, are the caller's fault: INVALID_ARGUMENT, no traceback."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from outrider.errors import DeadlineError, OutriderError
from outrider.generation import Delta, GenerationRequest
from outrider.limits import RateLimit
from outrider.transport.link.versions import METADATA as VERSION
from outrider.transport.remote import RemoteTarget
from outrider.v1 import generation_pb2, link_pb2
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows
from tests.transport.conftest import Serve

V = 5
GARBAGE = b"\xff\xff\xff"
PUBLIC, LINKS = (
    "/outrider.v1.GenerationService/",
    {"draft": "/outrider.v1.DraftService/", "target": "/outrider.v1.TargetService/"},
)
HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/"


def service(role: str) -> Any:
    rows = random_rows(V)
    return {"draft": ToyDraft(rows, V), "target": ToyTarget(rows, V), "generation": ScriptedGenerator()}[role]


async def status_of(address: str, method: str, shape: str, content: bytes) -> grpc.StatusCode:
    """Status with which a call of this shape ends; a stream is left open, as a link's is."""
    async with grpc.aio.insecure_channel(address) as channel:
        multi: Any = getattr(channel, shape)(method)
        try:
            if shape == "unary_unary":
                await multi(content, timeout=120)
            elif shape == "unary_stream":
                async for _ in multi(content, timeout=120):
                    pass
            else:
                call = multi(metadata=[VERSION], timeout=120)
                await call.write(content)
                while await call.read() is not grpc.aio.EOF:
                    pass
                code: grpc.StatusCode = await call.code()
                return code
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


@pytest.mark.parametrize(
    ("role", "method", "shape"),
    [
        ("generation", f"{PUBLIC}Generate", "unary_unary"),
        ("generation", f"{PUBLIC}StreamGenerate", "unary_stream"),
        ("generation", f"{PUBLIC}GetModelInfo", "unary_unary"),
        *((role, f"{name}Describe", "unary_unary") for role, name in LINKS.items()),
        *((role, f"{name}Attach", "stream_stream") for role, name in LINKS.items()),
        ("target", f"{HEALTH}Check", "unary_unary"),
        ("target", f"{HEALTH}Watch", "unary_stream"),
        ("target", f"{REFLECTION}ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_bytes_that_are_no_message(
    serve: Serve, caplog: pytest.LogCaptureFixture, role: str, method: str, shape: str
) -> None:
    server = await serve(role, service(role))
    assert await status_of(server.address, method, shape, GARBAGE) is grpc.StatusCode.INVALID_ARGUMENT
    assert not errors_in(caplog)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        (f"{HEALTH}Check", "unary_unary"),
        (f"{HEALTH}Watch", "unary_stream"),
        (f"{REFLECTION}ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_a_name_that_is_too_long_to_be_kept(serve: Serve, method: str, shape: str) -> None:
    server = await serve("target", service("target"))
    asked = health_pb2.HealthCheckRequest(service="a" * 5000).SerializeToString()
    assert await status_of(server.address, method, shape, asked) is grpc.StatusCode.INVALID_ARGUMENT


def _draft(**command: Any) -> bytes:
    return link_pb2.DraftCommands(commands=[link_pb2.DraftCommand(**command)]).SerializeToString()


def _target(**command: Any) -> bytes:
    return link_pb2.TargetCommands(commands=[link_pb2.TargetCommand(**command)]).SerializeToString()


BROKEN = {
    "an empty command to a draft": ("draft", _draft()),
    "an empty command to a target": ("target", _target()),
    "a judging rule that is none": ("target", _target(open=link_pb2.Open(judging_rule=77))),  # type: ignore[arg-type]
    "no acceptance method": ("draft", _draft(open=link_pb2.Open(session=1))),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_link_contract_is_one_warning(serve: Serve, caplog: pytest.LogCaptureFixture, case: str) -> None:
    role, content = BROKEN[case]
    toy = service(role)
    server = await serve(role, toy)
    for _ in range(5):
        code = await status_of(server.address, f"{LINKS[role]}Attach", "stream_stream", content)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert not errors_in(caplog)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a link from ipv4:127.0.0.1" in warning.getMessage()


@pytest.mark.parametrize("tag", [b"\xba\x3e", b"\x0a"], ids=["unknown field 999", "prompt_text, given again"])
async def test_bytes_of_a_request_that_are_not_used_are_bounded(serve: Serve, tag: bytes) -> None:
    """gRPC holds them while the stream runs, so that a few streams would take gigabytes."""
    server = await serve("generation", service("generation"))
    asked = generation_pb2.GenerateRequest(prompt_text="x").SerializeToString()
    for num_bytes, code in ((1 << 15, grpc.StatusCode.OK), (1 << 17, grpc.StatusCode.INVALID_ARGUMENT)):
        unused = tag + generation_pb2.GenerateRequest(prompt_text="y" * num_bytes).SerializeToString()[1:]
        assert await status_of(server.address, f"{PUBLIC}Generate", "unary_unary", unused + asked) is code


def test_a_rate_limit_says_how_many_it_held_back() -> None:
    now = 0.0
    limit = RateLimit(10.0, clock=lambda: now)
    assert [limit.take() for _ in range(4)] == [0, None, None, None]
    now = 9.9
    assert limit.take() is None
    now = 10.0
    assert limit.take() == 4
    now = 20.0
    assert limit.take() == 0


def test_a_rate_limit_lets_a_burst_through_in_each_interval() -> None:
    now = 0.0
    limit = RateLimit(10.0, burst=2, clock=lambda: now)
    assert [limit.take() for _ in range(4)] == [0, 0, None, None]
    now = 10.0
    assert [limit.take() for _ in range(3)] == [2, 0, None]


async def test_an_unknown_enum_of_a_user_names_its_field(serve: Serve) -> None:
    server = await serve("generation", ScriptedGenerator())
    request = generation_pb2.GenerateRequest(prompt_text="a")
    request.acceptance_method = 77  # type: ignore[assignment]
    content = request.SerializeToString()
    for method, shape in (("Generate", "unary_unary"), ("StreamGenerate", "unary_stream")):
        assert await status_of(server.address, PUBLIC + method, shape, content) is grpc.StatusCode.INVALID_ARGUMENT


class LateGenerator(ScriptedGenerator):
    """Ends at the very time that its callers give up: with an error, or with a result."""

    async def generate_stream(
        self,
        request: GenerationRequest,
        *,
        deadline_s: float | None = None,
        on_taken_in: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Delta, None]:
        assert deadline_s is not None
        number = len(self.requests)
        await asyncio.sleep(max(0.0, deadline_s - 0.0005 * (number % 8)))
        if number % 2:
            raise DeadlineError("the time is up")
        async for delta in super().generate_stream(request, deadline_s=deadline_s):
            yield delta


async def test_calls_that_end_as_they_are_answered_log_no_error(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve("generation", LateGenerator())
    content = generation_pb2.GenerateRequest(prompt_text="a").SerializeToString()

    async def call(channel: Any, number: int) -> str:
        try:
            if number % 2:
                await channel.unary_unary(f"{PUBLIC}Generate")(content, timeout=0.02 + 0.001 * number)
            else:
                async for _ in channel.unary_stream(f"{PUBLIC}StreamGenerate")(content, timeout=0.02 + 0.001 * number):
                    pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    codes: set[str] = set()
    async with grpc.aio.insecure_channel(server.address) as channel:
        for _ in range(10):
            codes.update(await asyncio.gather(*(call(channel, number) for number in range(40))))
    assert "DEADLINE_EXCEEDED" in codes
    assert codes <= {"OK", "DEADLINE_EXCEEDED", "CANCELLED"}
    assert not errors_in(caplog)


async def test_a_server_that_ends_is_not_told_of_as_one_of_tls() -> None:
    """A process that is killed closes the connections that wait to be accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def close_all() -> None:
            while True:
                try:
                    accepted, _ = listening.accept()
                except OSError:
                    return
                with accepted:
                    accepted.recv(24)

        threading.Thread(target=close_all, daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(OutriderError) as caught:
            await RemoteTarget(address, connect_timeout_s=1.0).describe()
        listening.shutdown(socket.SHUT_RDWR)
    assert "TLS" not in str(caught.value)
