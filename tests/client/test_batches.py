"""Lists of prompts, several generations of one, retries, and what help() shows."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import outrider
from outrider.client import AsyncClient, Client, GenerateOptions
from outrider.client.addresses import Addresses
from outrider.client.attempts import Attempts
from outrider.client.batches import each_request
from outrider.client.requests import build_request, max_retries, resume_timeout
from outrider.errors import CapacityError, ConfigError, DeadlineError, InvalidRequestError
from outrider.generation import GenerationResult
from tests.client.conftest import Service

TWO = {"max_tokens": 2}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture(params=["blocking", "asyncio"])
def generate(request: pytest.FixtureRequest, service: Service) -> Any:
    """``generate`` of one kind of client."""

    def blocking(*prompt: Any, **options: Any) -> Any:
        with Client(service.address) as client:
            return client.generate(*prompt, **options)

    def in_loop(*prompt: Any, **options: Any) -> Any:
        async def work() -> Any:
            async with AsyncClient(service.address) as client:
                return await client.generate(*prompt, **options)

        return asyncio.run(work())

    return blocking if request.param == "blocking" else in_loop


def prompts(service: Service) -> list[Any]:
    return sorted(request.prompt or request.prompt_token_ids for request in service.generator.requests)


def test_a_prompt_is_given_by_its_place(generate: Any, service: Service) -> None:
    assert isinstance(generate("one", **TWO), GenerationResult)
    assert isinstance(generate([1, 2], **TWO), GenerationResult)
    assert isinstance(generate(prompt="three", **TWO), GenerationResult)
    asked = [request.prompt or request.prompt_token_ids for request in service.generator.requests]
    assert asked == ["one", (1, 2), "three"]
    with pytest.raises(TypeError, match="given twice"):
        generate("one", prompt="two")


def test_many_prompts_give_as_many_results_in_order(generate: Any, service: Service) -> None:
    texts = [f"prompt {number}" for number in range(80)]
    results = generate(texts, **TWO, request_id="mine")
    assert [result.request_id for result in results] == [f"mine-{number}-0" for number in range(80)]
    assert prompts(service) == sorted(texts)
    results = generate([[1, 2], [3]], **TWO)
    assert len(results) == 2
    assert {request.prompt_token_ids for request in service.generator.requests[-2:]} == {(1, 2), (3,)}


def test_n_generations_have_seeds_of_their_own(generate: Any, service: Service) -> None:
    results = generate("x", n=3, seed=2**64 - 2, **TWO)
    assert [result.seed for result in results] == [2**64 - 2, 2**64 - 1, 0]
    assert len(generate("x", n=1, **TWO)) == 1
    assert len(generate(["a", "b"], n=2, **TWO)) == 4
    assert prompts(service)[:4] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("stream", r"stream\(\) yields deltas"),
        ("model", "serves one model"),
        ("sampling_params", "are options here, such as temperature"),
        ("text", "by its place, or as prompt"),
        ("max_new_tokens", "did you mean 'max_tokens'"),
    ],
)
def test_options_of_other_clients_are_told_what_there_is_instead(generate: Any, option: str, said: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'; .*{said}"):
        generate("x", **{option: 1})


def test_wrong_arguments_of_a_client_are_named() -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=r"^address: should be host:port.*, not 50050$"):
            make(50050)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^token: should be a text, or a function that returns one, not int$"):
            make("a:1", token=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [5, 1.5, b"text", {"a": 1}, [1.5], [[1], [2.5]], [{"role": "user"}], ["a", 1]])
def test_a_prompt_that_is_none_is_named_as_the_prompt(generate: Any, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: must be a text") as caught:
        generate(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", 1025])
def test_a_wrong_n_is_named(generate: Any, n: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"n: must be a whole number from 1 to 1024"):
        generate("x", n=n)


def test_nothing_is_sent_where_one_of_many_is_wrong(generate: Any, service: Service) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: "):
        generate(["fine", "\ud800"], **TWO)
    with pytest.raises(InvalidRequestError, match="at least one prompt"):
        generate([])
    with pytest.raises(InvalidRequestError, match="prompt: must be a text, token ids, or a list of either"):
        generate({"prompt": "fine"}, **TWO)
    assert service.generator.requests == []


def test_the_first_error_ends_the_call(generate: Any, service: Service) -> None:
    service.generator.error = CapacityError("the queue is full")
    with pytest.raises(CapacityError):
        generate(["a", "b", "c"], **TWO)


def test_a_server_without_room_is_asked_again_when_that_is_wished(generate: Any, service: Service) -> None:
    full = CapacityError("the queue is full", retry_after_ms=1)
    service.generator.failures.extend([(0, full), (0, full)])
    assert isinstance(generate("x", max_retries=2, **TWO), GenerationResult)
    assert len(service.generator.requests) == 3
    service.generator.failures.extend([(0, full), (0, full)])
    with pytest.raises(CapacityError):
        generate("x", max_retries=1, **TWO)
    service.generator.failures.clear()
    service.generator.failures.append((0, full))
    with pytest.raises(CapacityError):
        generate("x", **TWO)


def test_a_stream_is_begun_again_only_without_output(service: Service) -> None:
    full = CapacityError("the queue is full", retry_after_ms=1)
    service.generator.failures.extend([(0, full), (1, full)])
    with Client(service.address) as client, pytest.raises(CapacityError):
        list(client.stream("x", max_retries=5, max_tokens=3))
    assert len(service.generator.requests) == 2


def test_retries_wait_as_long_as_the_server_says_and_not_past_the_deadline() -> None:
    now = 0.0
    attempts = Attempts(
        Addresses(["a"]),
        timeout_s=1.0,
        resume_timeout_s=None,
        is_closed=lambda: False,
        max_retries=2,
        clock=lambda: now,
        jitter=lambda: 0.5,
    )
    attempts.begin()
    assert attempts.failed(CapacityError("full", retry_after_ms=400)) == pytest.approx(0.6)
    now = 0.6
    attempts.begin()
    with pytest.raises(CapacityError):  # 0.6 s more would be past the caller's deadline
        attempts.failed(CapacityError("full", retry_after_ms=400))
    now = 2.0
    with pytest.raises(DeadlineError):
        attempts.begin()


@pytest.mark.parametrize("value", [-1, True, 1.5, "3"])
def test_wrong_retries_are_named(generate: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="max_retries"):
        generate("x", max_retries=value)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["generate", "stream", "chat"])
def test_help_shows_every_option_with_its_type(kind: type, name: str) -> None:
    method = getattr(kind, name)
    parameters = inspect.signature(method).parameters
    given_by_place = {"messages", "prompt", "prompt_token_ids"} if name == "chat" else {"prompt"}
    assert GenerateOptions.__annotations__.keys() - given_by_place <= parameters.keys()
    assert ("prompt_token_ids" in parameters) == (name != "chat")
    assert str(parameters["temperature"].annotation) == "float | None"
    assert "\n    top_k: How many of the likeliest tokens are kept" in (method.__doc__ or "")


def test_help_shows_the_defaults_that_options_have() -> None:
    """An option that is given its default is one that is left out."""
    shown = {
        name: found.default
        for name, found in inspect.signature(Client.generate).parameters.items()
        if found.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("n", "prompt_token_ids")
    }
    depending = {name for name, default in shown.items() if repr(default) == "..."}
    assert depending == {"add_generation_prompt", "add_special_tokens"}
    without = build_request({"prompt": "x", "seed": 1})[0]
    for name in shown.keys() - depending - {"seed", "continue_final_message"}:
        options: Any = {"prompt": "x", "seed": 1, name: shown[name]}
        assert build_request(options)[0] == without, name
        assert (resume_timeout(options), max_retries(options)) == (None, 0)
    assert shown["resume_timeout"] == 60.0
    chat: Any = {"messages": [{"role": "user", "content": "x"}], "seed": 1}
    given: Any = {**chat, "continue_final_message": shown["continue_final_message"]}
    assert build_request(given)[0] == build_request(chat)[0]


def test_the_package_lists_what_it_offers() -> None:
    assert {"Client", "AsyncClient", "CapacityError"} <= set(dir(outrider))
    assert "Any" not in dir(outrider)
    assert repr(Client("a:1", "b:2")) == "Client('a:1', 'b:2')"


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(Client()) == "Client('127.0.0.1:50050')"
    monkeypatch.setenv("OUTRIDER_ADDRESS", "a:1,b:2")
    assert repr(Client()) == "Client('a:1', 'b:2')"
    assert repr(Client("c:3")) == "Client('c:3')"


def test_one_call_is_left_as_it_is() -> None:
    assert each_request("x", None, {}) is None
    assert each_request(None, None, {"prompt": "x"}) is None
