"""Streams that go on after an interruption: nothing repeated, nothing lost, and a result of the whole."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import AsyncClient, Client
from outrider.cli.app import app
from outrider.cli.stack.held_ports import hold_port
from outrider.client.attempts import MAX_FRUITLESS
from outrider.client.resuming import ResumableGeneration, add_statistics
from outrider.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OutriderError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
)
from outrider.generation import (
    DEFAULTABLE,
    Delta,
    GenerationRequest,
    GenerationResult,
    Resumption,
    SpeculationStats,
    Started,
)
from outrider.requests import check_request
from outrider.transport.convert.generation import started_from_proto, started_to_proto
from outrider.types import AcceptanceMethod, SamplingParams
from tests.client.conftest import Service

GONE = UnavailableError("the coordinator is shutting down")
Read = Callable[..., list[Delta]]


def read_blocking(*addresses: str, **options: Any) -> list[Delta]:
    with Client(addresses) as client:
        return list(client.stream(resume=True, **options))


def read_asyncio(*addresses: str, **options: Any) -> list[Delta]:
    async def read() -> list[Delta]:
        async with AsyncClient(addresses) as client:
            return [delta async for delta in client.stream(resume=True, **options)]

    return asyncio.run(read())


@pytest.fixture(params=[read_blocking, read_asyncio], ids=["Client", "AsyncClient"])
def read(request: pytest.FixtureRequest) -> Read:
    chosen: Read = request.param
    return chosen


def result_of(deltas: list[Delta]) -> GenerationResult:
    assert [delta.result is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    result = deltas[-1].result
    assert result is not None
    assert sum((delta.token_ids for delta in deltas), ()) == result.token_ids
    assert "".join(delta.text for delta in deltas) == result.text
    return result


def test_an_undisturbed_stream_is_that_of_any_request(service: Service, read: Read) -> None:
    deltas = read(service.address, prompt="x", max_tokens=3, logprobs=0)
    result = result_of(deltas)
    with Client(service.address) as client:
        assert result == client.generate(prompt="x", max_tokens=3, logprobs=0)
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,), ()]
    assert all(delta.started is None and delta.progress is None for delta in deltas)
    first = service.generator.requests[0]
    assert first == GenerationRequest(
        prompt="x", max_tokens=3, logprobs=0, resumable=True, defaulted=frozenset(DEFAULTABLE)
    )


@pytest.mark.parametrize(
    "error",
    [GONE, RequestCancelledError("shut down"), CapacityError("full", retry_after_ms=1)],
    ids=lambda error: type(error).__name__,
)
def test_an_interrupted_stream_goes_on_where_it_was(service: Service, read: Read, error: OutriderError) -> None:
    service.generator.failures.extend([(3, error), (3, error), (7, error)])
    result = result_of(read(service.address, prompt="é", max_tokens=9, min_tokens=4, logprobs=1, stop="never"))
    assert result.text == "<0><1><2><3><4><5><6><7><8>"
    first, *later = service.generator.requests
    assert [request.resume and request.resume.emitted_token_ids for request in later] == [
        (0, 1, 2),
        (0, 1, 2),
        (0, 1, 2, 3, 4, 5, 6),
    ]
    for request in later:  # all else is as the first server settled it
        assert request.prompt is None and request.prompt_token_ids == tuple("é".encode())
        assert (request.seed, request.request_id) == (17, "made up")
        assert request.acceptance_method is AcceptanceMethod.COUPLED
        assert request.resume is not None and request.resume.model == "scripted"
        assert (request.max_tokens, request.sampling, request.stop) == (9, first.sampling, first.stop)


def test_a_long_stream_is_no_row_of_fruitless_attempts(service: Service, read: Read) -> None:
    service.generator.failures.append((MAX_FRUITLESS + 5, GONE))
    result = result_of(read(service.address, prompt="x", max_tokens=MAX_FRUITLESS + 8))
    assert len(result.token_ids) == MAX_FRUITLESS + 8


def test_the_result_is_of_the_whole(service: Service, read: Read) -> None:
    service.generator.failures.extend([(4, GONE), (6, GONE)])
    result = result_of(read(service.address, prompt_token_ids=[1], max_tokens=9, logprobs=1))
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(range(9))
    # Calls of four and two tokens broke off, the first of each without a proposal; then the scripted result.
    assert result.speculation == SpeculationStats(4 + 2 + 5, 6 + 2 + 4, 3, 3 + 1 + 4, (3 + 1 + 1, 0, 1), 1 + 3 / 6)
    assert result.usage.completion_tokens == 9
    timing = result.timing
    assert (timing.queue, timing.draft, timing.wire) == (0.125 + 0.125 + 0.25, 2.0, 8.0)
    assert timing.first_token == pytest.approx(0.25)
    assert timing.total > 1.0


def test_a_result_that_was_lost_comes_again_without_output(service: Service, read: Read) -> None:
    """All tokens had been delivered when the call broke off."""
    service.generator.failures.append((2, GONE))
    deltas = read(service.address, prompt="x", max_tokens=2)
    service.generator.failures.clear()
    assert result_of(deltas).token_ids == (0, 1)


def test_a_server_that_stops_and_comes_back_is_waited_for(service: Service, read: Read) -> None:
    service.generator.stop_after = 4

    def replace_it() -> None:
        service.until(num_emitted=4)
        service.stop()
        service.generator.stop_after = None
        service.start_again()

    with in_background(replace_it):
        result = result_of(read(service.address, prompt="x", max_tokens=9))
    assert result.token_ids == tuple(range(9))


def test_a_server_that_drains_and_cancels_is_gone_on_from_elsewhere(
    services: tuple[Service, Service], read: Read
) -> None:
    first, second = services
    first.generator.stop_after = 3

    def shut_down() -> None:
        first.until(num_emitted=3)
        first.shut_down()

    with in_background(shut_down):
        result = result_of(read(first.address, second.address, prompt="x", max_tokens=6))
    assert result.token_ids == tuple(range(6))
    assert second.generator.requests[0].resume == Resumption((0, 1, 2), "scripted")


def test_a_server_that_is_not_there_yet_is_waited_for(service: Service, read: Read) -> None:
    service.stop()
    with in_background(service.start_again):
        assert result_of(read(service.address, prompt="x", max_tokens=2)).token_ids == (0, 1)


def test_an_interruption_that_lasts_is_its_error(service: Service, read: Read) -> None:
    service.generator.error = GONE
    for seconds in (1.0, 10.0, 100.0):  # a busy machine may be asked only once in a short time
        with pytest.raises(UnavailableError, match="shutting down"):
            read(service.address, prompt="x", resume_timeout=seconds)
        if len(service.generator.requests) > 1:
            return
        service.generator.requests.clear()
    pytest.fail("it was not asked again")


def test_the_callers_timeout_counts(service: Service, read: Read) -> None:
    service.generator.error = GONE
    with pytest.raises(DeadlineError):
        read(service.address, prompt="x", timeout=0.2)
    service.generator.error, service.generator.stop_after = None, 1
    service.generator.failures.append((1, GONE))
    with pytest.raises(DeadlineError):
        read(service.address, prompt="x", timeout=0.5)


@pytest.mark.parametrize("error", [InvalidRequestError("prompt", "is wrong"), NonFiniteLogitsError("NaN")])
def test_what_is_not_about_availability_is_raised_at_once(service: Service, read: Read, error: OutriderError) -> None:
    service.generator.failures.append((2, error))
    with pytest.raises(type(error)):
        read(service.address, prompt="x")
    assert len(service.generator.requests) == 1


def test_a_server_that_knows_no_resumption_is_told_apart(service: Service, read: Read) -> None:
    service.generator.is_old = True
    with pytest.raises(ProtocolError, match="older"):
        read(service.address, prompt="x")


def test_a_server_that_begins_anew_is_not_believed(service: Service, read: Read) -> None:
    service.generator.num_too_many = 1
    with pytest.raises(ProtocolError, match="1 tokens"):
        read(service.address, prompt="x")


def test_generate_resumes_too(service: Service) -> None:
    service.generator.failures.extend([(2, GONE), (4, GONE)])
    with Client(service.address) as client:
        assert client.generate(prompt="x", max_tokens=6, resume=True).token_ids == tuple(range(6))


async def test_generate_resumes_too_asyncio(service: Service) -> None:
    service.generator.failures.extend([(2, GONE), (4, GONE)])
    async with AsyncClient(service.address) as client:
        assert (await client.generate(prompt="x", max_tokens=6, resume=True)).token_ids == tuple(range(6))


def test_without_resume_an_interruption_is_an_error(service: Service) -> None:
    service.generator.failures.append((2, GONE))
    with Client(service.address) as client, pytest.raises(UnavailableError):
        list(client.stream(prompt="x"))
    assert service.generator.requests == [GenerationRequest(prompt="x", defaulted=frozenset(DEFAULTABLE))]


def test_closing_a_client_ends_streams_that_would_resume(service: Service) -> None:
    service.generator.stop_after = 1
    client = Client(service.address)
    stream = client.stream(prompt="x", resume=True)
    assert next(stream).token_ids == (0,)
    client.close()
    with pytest.raises(RequestCancelledError):
        next(stream)
    service.until(num_abandoned=1)


async def test_closing_an_async_client_ends_streams_that_would_resume(service: Service) -> None:
    service.generator.stop_after = 1
    client = AsyncClient(service.address)
    stream = client.stream(prompt="x", resume=True)
    assert (await anext(stream)).token_ids == (0,)
    await client.close()
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    await asyncio.to_thread(service.until, num_abandoned=1)


async def test_leaving_a_resumable_stream_early_cancels_it(service: Service) -> None:
    service.generator.stop_after = 1
    with Client(service.address) as client, contextlib.closing(client.stream(prompt="x", resume=True)) as stream:
        await asyncio.to_thread(next, stream)
    await asyncio.to_thread(service.until, num_abandoned=1)
    async with AsyncClient(service.address) as other:
        async with contextlib.aclosing(other.stream(prompt="x", resume=True)) as deltas:
            await anext(deltas)
        await asyncio.to_thread(service.until, num_abandoned=2)


@pytest.mark.parametrize("options", [{"resume": 1}, {"resume_timeout": 0}, {"resume_timeout": "long"}])
def test_bad_options_of_resumption_are_refused(service: Service, options: dict[str, Any]) -> None:
    with Client(service.address) as client, pytest.raises(InvalidRequestError) as caught:
        client.stream(prompt="x", **options)
    assert caught.value.field == next(iter(options))


def test_min_tokens_stay_within_max_tokens_that_the_models_length_trimmed() -> None:
    generation = ResumableGeneration(
        GenerationRequest(prompt="x", max_tokens=100, sampling=SamplingParams(min_tokens=50))
    )
    generation.next_request()
    generation.take(Delta("", (), started=Started(3, (1,), 20, AcceptanceMethod.COUPLED, "r", "m", 0)))
    request = generation.next_request()
    assert (request.max_tokens, request.sampling.min_tokens) == (20, 20)
    check_request(request)


def test_parameters_that_were_left_to_the_first_server_are_pinned() -> None:
    given = SamplingParams(top_p=0.5, frequency_penalty=0.25)
    generation = ResumableGeneration(
        GenerationRequest(prompt="x", sampling=given, defaulted=frozenset(DEFAULTABLE) - {"top_p"})
    )
    generation.next_request()
    in_use = {"temperature": 0.7, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.25}
    started = Started(3, (1,), 20, AcceptanceMethod.COUPLED, "r", "m", 0, in_use)
    generation.take(Delta("", (), started=started_from_proto(started_to_proto(started).started)))
    request = generation.next_request()
    assert request.sampling == replace(given, temperature=0.7, top_k=20, repetition_penalty=1.25)
    assert not request.defaulted, "another server would take its own"


def test_parameters_of_a_server_that_does_not_tell_them_are_left_to_the_next() -> None:
    generation = ResumableGeneration(GenerationRequest(prompt="x", defaulted=frozenset(DEFAULTABLE)))
    generation.next_request()
    generation.take(Delta("", (), started=Started(3, (1,), 20, AcceptanceMethod.COUPLED, "r", "m", 0)))
    assert generation.next_request().defaulted == frozenset(DEFAULTABLE)


def test_statistics_of_no_proposals_add_up_to_none() -> None:
    none = SpeculationStats(3, 0, 0, 0, (), 0.0, 5, 4)
    assert add_statistics([none, none]) == SpeculationStats(6, 0, 0, 0, (), 0.0, 10, 8)


@contextlib.contextmanager
def in_background(work: Callable[[], None]) -> Iterator[None]:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(timeout=120)
    assert not caught


def test_the_command_line_resumes_at_the_next_address(service: Service) -> None:
    service.generator.failures.append((2, GONE))
    dead = f"127.0.0.1:{hold_port()}"
    arguments = ["generate", "x", "--max-tokens", "4", "--resume", "--address", f"{dead},{service.address}"]
    outcome = CliRunner().invoke(app, arguments)
    assert (outcome.exit_code, outcome.stdout) == (0, "<0><1><2><3>\n")
    assert service.generator.requests[-1].resume == Resumption((0, 1), "scripted")
