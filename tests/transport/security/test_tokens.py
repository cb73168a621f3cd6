"""Bearer tokens: who is let in, who is told why not, and where a token does not go."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from outrider import AsyncClient, Client, Tls
from outrider.errors import ConfigError, UnauthenticatedError
from outrider.transport.remote import RemoteTarget
from outrider.transport.security import ClientSecurity, ServerSecurity, ServerTls, TokenFile
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.scripted_generator import ScriptedGenerator
from tests.transport.security.authorities import Authority
from tests.transport.security.conftest import ServeWith, at_localhost


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# of the first team\nalpha-123\n\nbeta-456\n")
    return path


def asks(tokens: Path) -> ServerSecurity:
    return ServerSecurity(tokens=TokenFile("api_token_file", str(tokens)))


async def ask(address: str, token: str | None) -> str:
    async with AsyncClient(address, token=token) as client:
        return (await client.generate(prompt="x", max_tokens=1, timeout=120)).text


async def test_every_token_of_the_file_and_no_other(serve_with: ServeWith, tokens: Path) -> None:
    server = await serve_with(asks(tokens))
    assert await ask(server.address, "alpha-123") == await ask(server.address, "beta-456") == "<0>"
    for wrong in ("alpha-124", "alpha-12", "alpha-1234", "ALPHA-123"):
        with pytest.raises(UnauthenticatedError, match="the bearer token is not known here"):
            await ask(server.address, wrong)
    with pytest.raises(UnauthenticatedError, match="asks for a bearer token"):
        await ask(server.address, None)


async def test_requests_of_different_tokens_share_no_cached_prompts(serve_with: ServeWith, tokens: Path) -> None:
    generator = ScriptedGenerator()
    server = await serve_with(asks(tokens), generator=generator)
    for token in ("alpha-123", "beta-456", "alpha-123"):
        await ask(server.address, token)
    async with AsyncClient(server.address, token="alpha-123") as client:
        await client.generate(prompt="x", max_tokens=1, timeout=120, cache_salt="shared")
    tokens.write_text("alpha-123\n")
    await ask(server.address, "alpha-123")
    first, second, again, named, alone = [request.cache_salt for request in generator.requests]
    assert first and second and first != second and again == first
    assert (named, alone) == ("shared", "")


async def test_streams_facts_and_plain_clients_bring_it_too(serve_with: ServeWith, tokens: Path) -> None:
    server = await serve_with(asks(tokens))
    async with AsyncClient(server.address, token="alpha-123") as client:
        assert (await client.model_info()).target_model
        assert [delta async for delta in client.stream(prompt="x", max_tokens=1, timeout=120)][-1].result is not None

    def ask_blocking(token: str | None) -> str:
        with Client(server.address, token=token) as client:
            assert client.model_info().target_model
            last = list(client.stream(prompt="x", max_tokens=1, timeout=120))[-1]
            return client.generate(prompt="x", max_tokens=1, timeout=120).text if last.result else ""

    assert await asyncio.to_thread(ask_blocking, "beta-456") == "<0>"
    with pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(ask_blocking, "no")


async def test_links_bring_it_too(serve_with: ServeWith, tokens: Path) -> None:
    server = await serve_with(asks(tokens), role="target")
    good = RemoteTarget(server.address, ClientSecurity(token=TokenFile("link_token_file", str(tokens)).first))
    assert (await good.describe()).model_name == "toy-target"
    link = await good.attach()
    await link.close()
    with pytest.raises(UnauthenticatedError):
        await RemoteTarget(server.address, ClientSecurity(token=lambda: "other")).describe()
    bare = RemoteTarget(server.address)
    with pytest.raises(UnauthenticatedError):
        await bare.describe()
    link = await bare.attach()
    with pytest.raises(Exception, match="asks for a bearer token"):
        await anext(link.events())
    await link.close()


async def test_the_status_says_why_to_any_client(serve_with: ServeWith, tokens: Path) -> None:
    server = await serve_with(asks(tokens))
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationServiceStub(channel).GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=120)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(info)
    assert (info.domain, info.reason) == ("outrider", "UnauthenticatedError")


@pytest.mark.parametrize("method", ["Describe", "Attach"])
async def test_a_stranger_is_refused_before_its_request_is_read(
    serve_with: ServeWith, tokens: Path, method: str
) -> None:
    """A request may take 256 MiB, more when it was compressed: nobody who has no token makes a service hold it."""

    async def never_sent() -> Any:
        await asyncio.Event().wait()
        yield b""

    server = await serve_with(asks(tokens), role="target")
    async with grpc.aio.insecure_channel(server.address) as channel:
        ask: Any = channel.stream_stream(f"/outrider.v1.TargetService/{method}")
        call = ask(never_sent(), timeout=120)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_and_reflection_ask_for_none(serve_with: ServeWith, tokens: Path) -> None:
    server = await serve_with(asks(tokens))
    async with grpc.aio.insecure_channel(server.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listing = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(listing)
        assert [answer async for answer in call]


async def test_a_changed_file_counts_from_the_next_call_on(
    serve_with: ServeWith, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve_with(asks(tokens))
    tokens.write_text("gamma-7890\n")
    assert await ask(server.address, "gamma-7890") == "<0>"
    with pytest.raises(UnauthenticatedError):
        await ask(server.address, "alpha-123")
    tokens.write_text("# nothing\n")
    assert await ask(server.address, "gamma-7890") == "<0>"
    assert "those in use stay" in caplog.text
    assert "gamma" not in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "holds no token; there should be one a line"),
        (b"two words\n", "one word of printable ASCII"),
        ("schlüssel\n".encode(), "one word of printable ASCII"),
        (b"\xff\xfe\n", "should be a text file"),
    ],
)
def test_files_without_a_usable_token(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenFile("api_token_file", str(path))
    assert caught.value.field == "api_token_file"
    assert "words" not in str(caught.value).replace("one word", "")
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile("api_token_file", str(tmp_path / "nowhere"))


def test_a_token_does_not_leave_this_machine_in_plaintext() -> None:
    with pytest.raises(
        ConfigError, match=r"token: would go to model\.example:443 unencrypted; TLS should be on"
    ) as told:
        AsyncClient("model.example:443", token="alpha-123")
    assert "alpha" not in str(told.value)
    with pytest.raises(ConfigError, match="unencrypted"):
        Client("192.0.2.1:443", token="alpha-123")
    Client("192.0.2.1:443", token="alpha-123", tls=True).close()
    Client("192.0.2.1:443", token="alpha-123", allow_plaintext_token=True).close()
    for near in ("localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/tmp/a.sock"):
        Client(near, token="alpha-123").close()


async def test_a_coordinators_token_neither(tokens: Path) -> None:
    security = ClientSecurity(token=TokenFile("link_token_file", str(tokens)).first, token_setting="link_token_file")
    with pytest.raises(ConfigError, match=r"link_token_file: would go to target\.example:1 unencrypted"):
        await RemoteTarget("target.example:1", security).describe()


async def test_a_server_that_asks_for_tokens_in_plaintext_warns(
    serve_with: ServeWith, tokens: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await serve_with(asks(tokens))
        await serve_with(ServerSecurity(ServerTls(**authority.issue()), asks(tokens).tokens), host="0.0.0.0")
        assert "without TLS" not in caplog.text
        await serve_with(asks(tokens), host="0.0.0.0")
    assert "without TLS and are readable on the network" in caplog.text


async def test_the_environment_says_what_the_arguments_leave_open(
    serve_with: ServeWith, tokens: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = ServerSecurity(ServerTls(**authority.issue()), asks(tokens).tokens)
    address = at_localhost(await serve_with(security))
    monkeypatch.setenv("OUTRIDER_API_TOKEN", "beta-456")
    monkeypatch.setenv("OUTRIDER_TLS_CA_FILE", authority.ca_file)
    assert await ask(address, None) == "<0>"
    with pytest.raises(UnauthenticatedError):
        await ask(address, "not-that-one")
    async with AsyncClient(address, tls=False) as client:
        with pytest.raises(Exception, match="speaks TLS and closed the connection"):
            await client.model_info()
    monkeypatch.setenv("OUTRIDER_TLS", "perhaps")
    with pytest.raises(ConfigError, match="OUTRIDER_TLS: should be 1 or 0, not 'perhaps'"):
        AsyncClient(address)
    monkeypatch.delenv("OUTRIDER_TLS")
    monkeypatch.setenv("OUTRIDER_API_TOKEN", "two words")
    with pytest.raises(ConfigError, match="one word"):
        AsyncClient(address, tls=Tls())
