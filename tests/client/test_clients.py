"""Both clients against a served generator: values out, our errors alone, and no call that outlives its caller."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import AsyncClient, Client, errors
from outrider.chat import ChatPrompt
from outrider.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    OutriderError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.generation import DEFAULTABLE, Delta, GenerationRequest, GenerationResult, TokenizerFiles
from outrider.transport.security import ServerSecurity, TokenFile
from outrider.types import AcceptanceMethod, SamplingParams
from tests.client.conftest import Service
from tests.support.scripted_generator import INFO

EVERYTHING: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 11,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.5,
    "logit_bias": {3: -1.5, 9: 100},
    "bad_words": ["bad", "worse"],
    "allowed_token_ids": [1, 2, 3],
    "seed": (1 << 64) - 1,
    "stop": "\n\n",
    "stop_token_ids": [8],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logprobs": 0,
    "prompt_logprobs": 1,
    "num_speculative_tokens": 0,
    "acceptance_method": "coupled",
    "request_id": "mine",
    "cache_salt": "tenant",
    "add_special_tokens": False,
    "skip_special_tokens": False,
}
REQUEST = GenerationRequest(
    prompt_token_ids=(1, 2),
    max_tokens=5,
    sampling=SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=11,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=-0.5,
        presence_penalty=0.5,
        min_tokens=2,
        logit_bias=((3, -1.5), (9, 100.0)),
        allowed_token_ids=(1, 2, 3),
    ),
    bad_words=("bad", "worse"),
    seed=(1 << 64) - 1,
    stop=("\n\n",),
    stop_token_ids=(8,),
    ignore_eos=True,
    include_stop_str_in_output=True,
    logprobs=0,
    prompt_logprobs=1,
    num_speculative_tokens=0,
    acceptance_method=AcceptanceMethod.COUPLED,
    request_id="mine",
    cache_salt="tenant",
    add_special_tokens=False,
    skip_special_tokens=False,
)


class Blocking:
    """``Client``, with the manners of ``Asyncio``."""

    def generate(self, address: str, **options: Any) -> GenerationResult:
        with Client(address) as client:
            made: GenerationResult = client.generate(**options)
            return made

    def stream(self, address: str, **options: Any) -> list[Delta]:
        with Client(address) as client:
            return list(client.stream(**options))

    def chat(self, address: str, messages: Any, **options: Any) -> GenerationResult:
        with Client(address) as client:
            return client.chat(messages, **options)

    def tokenizer_files(self, address: str, **options: Any) -> TokenizerFiles:
        with Client(address) as client:
            return client.tokenizer_files(**options)

    def model_info(self, address: str) -> outrider.ModelInfo:
        with Client(address) as client:
            return client.model_info()


class Asyncio:
    """``AsyncClient``, run to its end."""

    def generate(self, address: str, **options: Any) -> GenerationResult:
        async def work() -> GenerationResult:
            async with AsyncClient(address) as client:
                made: GenerationResult = await client.generate(**options)
                return made

        return asyncio.run(work())

    def stream(self, address: str, **options: Any) -> list[Delta]:
        async def work() -> list[Delta]:
            async with AsyncClient(address) as client:
                return [delta async for delta in client.stream(**options)]

        return asyncio.run(work())

    def chat(self, address: str, messages: Any, **options: Any) -> GenerationResult:
        async def work() -> GenerationResult:
            async with AsyncClient(address) as client:
                return await client.chat(messages, **options)

        return asyncio.run(work())

    def tokenizer_files(self, address: str, **options: Any) -> TokenizerFiles:
        async def work() -> TokenizerFiles:
            async with AsyncClient(address) as client:
                return await client.tokenizer_files(**options)

        return asyncio.run(work())

    def model_info(self, address: str) -> outrider.ModelInfo:
        async def work() -> outrider.ModelInfo:
            async with AsyncClient(address) as client:
                return await client.model_info()

        return asyncio.run(work())


Either = Blocking | Asyncio


@pytest.fixture(params=[Blocking(), Asyncio()], ids=["Client", "AsyncClient"])
def either(request: pytest.FixtureRequest) -> Either:
    chosen: Either = request.param
    return chosen


def test_every_option_arrives_bit_for_bit(service: Service, either: Either) -> None:
    result = either.generate(service.address, prompt_token_ids=[1, 2], **EVERYTHING)
    deltas = either.stream(service.address, prompt_token_ids=(1, 2), **EVERYTHING)
    assert service.generator.requests == [REQUEST, REQUEST]
    assert result == deltas[-1].result
    assert result.text == "".join(delta.text for delta in deltas) == "<0><1><2><3><4>"
    assert result.token_ids == sum((delta.token_ids for delta in deltas), ()) == (0, 1, 2, 3, 4)
    logprobs: Any = sum((delta.logprobs or () for delta in deltas), ())
    assert result.logprobs == logprobs and len(logprobs) == 5
    assert result.seed == (1 << 64) - 1 and result.request_id == "mine"


def test_what_is_left_out_has_its_default(service: Service, either: Either) -> None:
    result = either.generate(service.address, prompt="x")
    assert service.generator.requests == [GenerationRequest(prompt="x", defaulted=frozenset(DEFAULTABLE))]
    assert result.logprobs is None and result.prompt_logprobs is None
    assert [delta.logprobs for delta in either.stream(service.address, prompt="x", max_tokens=1)] == [None, None]


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"id": 1, "share": 0.5}]},
]


def test_a_chat_arrives_as_it_was_given(service: Service, either: Either) -> None:
    tools, documents = [{"type": "function", "function": {"name": "f", "strict": None}}], [{"title": "t"}]
    options: dict[str, Any] = {"max_tokens": 2, "tools": tools, "documents": documents, "chat_template": "rag"}
    result = either.chat(service.address, MESSAGES, **options, chat_template_kwargs={"thinks": False})
    chat = ChatPrompt(tuple(MESSAGES), tuple(tools), tuple(documents), "rag", {"thinks": False})
    assert service.generator.requests[0].chat == chat
    assert result.text == "<0><1>"
    either.stream(service.address, messages=MESSAGES[:1], max_tokens=1, continue_final_message=True, tools=[])
    last = service.generator.requests[-1].chat
    assert last == ChatPrompt(tuple(MESSAGES[:1]), (), add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": {1, 2}}]}, "messages[0].content"),
        ({"messages": MESSAGES, "prompt": "hi"}, "prompt"),
        ({"prompt": "hi", "tools": [{}]}, "tools"),
        ({"messages": MESSAGES, "continue_final_message": 1}, "continue_final_message"),
        ({"messages": MESSAGES, "chat_template": 1}, "chat_template"),
    ],
)
def test_a_bad_chat_never_reaches_the_server(
    service: Service, either: Either, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        either.generate(service.address, **options)
    assert caught.value.field == field
    assert not service.generator.requests


def test_tokenizer_files_are_sent_to_those_who_do_not_have_them(service: Service, either: Either) -> None:
    assert either.tokenizer_files(service.address) == service.generator.tokenizer
    known = either.tokenizer_files(service.address, known_sha256="hash")
    assert known == dataclasses.replace(service.generator.tokenizer, files={})


def test_model_info(service: Service, either: Either) -> None:
    assert either.model_info(service.address) == INFO


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("prompt", "is too long"),
        CapacityError("the queue is full", retry_after_ms=125),
        errors.NonFiniteLogitsError("logits are not finite"),
        UnavailableError("no target is attached"),
        errors.ModelError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_back_as_what_they_were(service: Service, either: Either, error: OutriderError) -> None:
    service.generator.error, service.generator.error_after = error, 1
    for call in (either.generate, either.stream):
        with pytest.raises(type(error)) as caught:
            call(service.address, prompt="x", max_tokens=3)
        assert str(caught.value) == str(error)
        assert type(caught.value) is type(error)
        assert caught.value.field == error.field
        if isinstance(caught.value, CapacityError):
            assert caught.value.retry_after_ms == 125


def test_a_bug_in_the_server_is_one_of_our_errors(service: Service, either: Either) -> None:
    service.generator.error = ZeroDivisionError("inside")
    with pytest.raises(OutriderError) as caught:
        either.generate(service.address, prompt="x")
    assert "inside" not in str(caught.value)


def test_a_wrong_address_is_named_and_told_soon(either: Either) -> None:
    calls: list[Callable[..., Any]] = [either.generate, either.stream]
    for call in calls:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            call("127.0.0.1:1", prompt="x")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        either.model_info("127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"nowhere\.invalid"):
        either.generate("nowhere.invalid:50050", prompt="x")


def test_the_port_of_http_is_told_from_that_of_grpc(either: Either) -> None:
    """A server of HTTP/1 closes, or answers with its first bytes, both of which gRPC tells in its own words."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Http1) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        for call in (either.generate, either.stream):
            with pytest.raises(OutriderError, match=f"^{address} does not speak gRPC: is it the port of HTTP"):
                call(address, prompt="x")
        with pytest.raises(ConfigError, match=r"should be host:port of gRPC, such as .*, and no URL, not 'http://"):
            either.generate(f"http://{address}", prompt="x")
        server.shutdown()


class _Http1(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.connection.recv(3)
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.connection.recv(1000)


def test_a_refused_connection_asks_whether_a_server_runs(either: Either) -> None:
    with pytest.raises(UnavailableError, match=r"Connection refused.*; is `outrider serve` running there\?$"):
        either.generate("127.0.0.1:1", prompt="x")


def test_a_service_that_asks_for_a_token_says_how_to_give_one(either: Either, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("key\n")
    service = Service(security=ServerSecurity(tokens=TokenFile("api_token_file", str(path))))
    try:
        for call in (either.generate, either.stream):
            with pytest.raises(UnauthenticatedError, match=r"--token-file FILE, .* OUTRIDER_API_TOKEN, or token="):
                call(service.address, prompt="x")
    finally:
        service.close()


def test_a_peer_that_never_speaks_is_given_up(either: Either, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.transport.channels.CONNECT_ATTEMPT_MS", 300)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=address):
            either.generate(address, prompt="x")


def test_a_timeout_ends_the_generation(service: Service, either: Either) -> None:
    service.generator.stop_after = 1
    for call in (either.generate, either.stream):
        service.generator.deadlines.clear()
        timeout = 1.0
        while not service.generator.deadlines:  # a busy host may not take it in before a short one
            timeout *= 2
            with pytest.raises(DeadlineError):
                call(service.address, prompt="x", timeout=timeout)
        service.until(num_abandoned=service.generator.num_asked)
        assert all(deadline is not None and deadline < timeout + 1 for deadline in service.generator.deadlines)


def test_a_server_that_goes_away_is_unavailable(service: Service, either: Either) -> None:
    service.generator.stop_after = 1

    def stop_while_it_runs() -> None:
        service.until(num_emitted=1)
        service.stop()

    ended = threading.Thread(target=stop_while_it_runs)
    ended.start()
    with pytest.raises(UnavailableError):
        either.generate(service.address, prompt="x")
    ended.join()


def test_bad_options_never_reach_the_server(service: Service, either: Either) -> None:
    with pytest.raises(InvalidRequestError):
        either.generate(service.address, prompt="x", temperature=-1)
    with pytest.raises(InvalidRequestError):
        either.stream(service.address, prompt="x", temperature=-1)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        either.generate(service.address, prompt="x", temprature=1)
    assert service.generator.requests == []


def test_streams_refuse_bad_options_when_they_are_made(service: Service) -> None:
    with Client(service.address) as client, pytest.raises(InvalidRequestError):
        client.stream(prompt="x", max_tokens=0)
    with pytest.raises(InvalidRequestError):
        AsyncClient(service.address).stream(prompt="x", max_tokens=0)


def test_leaving_a_blocking_stream_early_cancels_it(service: Service) -> None:
    service.generator.stop_after = 2
    with Client(service.address) as client:
        for delta in client.stream(prompt="x"):
            assert delta.text == "<0>"
            break
        service.until(num_abandoned=1)
        with contextlib.closing(client.stream(prompt="x")) as stream:
            assert next(stream).text == "<0>"
        service.until(num_abandoned=2)


async def test_leaving_an_async_stream_early_cancels_it(service: Service) -> None:
    service.generator.stop_after = 2
    async with AsyncClient(service.address) as client:
        async for delta in client.stream(prompt="x"):
            assert delta.text == "<0>"
            break
        gc.collect()
        await asyncio.to_thread(service.until, num_abandoned=1)
        async with contextlib.aclosing(client.stream(prompt="x")) as stream:
            assert (await anext(stream)).text == "<0>"
        await asyncio.to_thread(service.until, num_abandoned=2)


async def test_cancelling_a_task_cancels_its_call(service: Service) -> None:
    service.generator.stop_after = 1
    async with AsyncClient(service.address) as client:

        async def read() -> None:
            async for _ in client.stream(prompt="x"):
                pass

        for number, work in enumerate((client.generate(prompt="x"), read()), 1):
            task = asyncio.ensure_future(work)
            await asyncio.to_thread(service.until, num_emitted=number)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(service.until, num_abandoned=number)


async def test_closing_an_async_client_ends_its_calls_with_an_error_of_ours(service: Service) -> None:
    service.generator.stop_after = 1
    client = AsyncClient(service.address)
    task = asyncio.ensure_future(client.generate(prompt="x"))
    await asyncio.to_thread(service.until, num_emitted=1)
    await client.close()
    with pytest.raises(RequestCancelledError):
        await task
    await asyncio.to_thread(service.until, num_abandoned=1)


def test_closing_a_client_ends_its_calls_with_an_error_of_ours(service: Service) -> None:
    service.generator.stop_after = 1
    client = Client(service.address)
    caught: list[BaseException] = []

    def generate() -> None:
        try:
            client.generate(prompt="x")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    service.until(num_emitted=1)
    client.close()
    thread.join(timeout=60)
    assert [type(error) for error in caught] == [RequestCancelledError]
    service.until(num_abandoned=1)


def test_one_client_serves_several_threads(service: Service) -> None:
    results: list[GenerationResult] = []
    with Client(service.address) as client:
        threads = [
            threading.Thread(target=lambda size=size: results.append(client.generate(prompt="x", max_tokens=size)))
            for size in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(len(result.token_ids) for result in results) == list(range(1, 9))


def test_an_async_client_outlives_an_event_loop(service: Service) -> None:
    client = AsyncClient(service.address)
    assert asyncio.run(client.model_info()) == INFO
    assert asyncio.run(client.model_info()) == INFO


def test_a_prompt_of_a_megabyte_is_sent(service: Service, either: Either) -> None:
    either.generate(service.address, prompt="ä" * 500_000, max_tokens=1)
    assert service.generator.requests[0].prompt == "ä" * 500_000


def test_no_type_of_the_wire_is_in_the_public_surface() -> None:
    for name in outrider.__all__:
        module = getattr(outrider, name).__module__
        assert module.startswith("outrider.") and ".v1" not in module and ".transport" not in module, name
    for values in (GenerationResult, Delta, outrider.ModelInfo):
        for field in dataclasses.fields(values):
            assert "pb2" not in str(field.type) and "grpc" not in str(field.type)


def test_importing_outrider_imports_neither_grpc_nor_torch() -> None:
    code = "import sys, outrider; sys.exit(bool({'grpc', 'torch', 'google.protobuf'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    code = "import sys, outrider.client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Clint"):
        _ = outrider.Clint
