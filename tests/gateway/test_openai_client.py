"""The real ``openai`` client against the gateway: completions and chats, whole and streamed, sync and async, errors."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from outrider.errors import CapacityError, InvalidRequestError, UnavailableError
from tests.client.conftest import Service
from tests.gateway.conftest import TEXT, Gateway

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
assert TEXT.tokenizer is not None
RENDERED = TEXT.tokenizer.encode_prompt(
    "<system>Be brief.</system><user>hi</user><assistant>", add_special_tokens=False
)
HELLO = TEXT.tokenizer.encode_prompt("hello")


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("scripted", "model", "outrider")
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion(service: Service, client: OpenAI) -> None:
    found = client.completions.create(model="scripted", prompt="hello", max_tokens=3)
    assert found.object == "text_completion" and found.id.startswith("cmpl-") and found.model == "scripted"
    (choice,) = found.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "<0><1><2>", "length")
    usage = found.usage
    assert usage is not None and usage.prompt_tokens_details is not None and usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
    assert usage.completion_tokens_details.accepted_prediction_tokens == 3
    assert usage.completion_tokens_details.rejected_prediction_tokens == 1
    (request,) = service.generator.requests
    assert request.prompt_token_ids == HELLO and request.request_id == found.id


def test_a_streamed_completion(service: Service, client: OpenAI) -> None:
    stream = client.completions.create(
        model="scripted", prompt="hello", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert texts == ["<0>", "<1>", "<2>", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert [chunk.usage is None for chunk in chunks] == [True] * 4 + [False]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat(service: Service, client: OpenAI) -> None:
    found = client.chat.completions.create(model="scripted", messages=MESSAGES, max_completion_tokens=2)
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-")
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "<0><1>", "length")
    assert service.generator.requests[0].prompt_token_ids == RENDERED


def test_a_streamed_chat(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=2, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "<0><1>"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]


async def test_the_async_client_with_several_streams_at_once(gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

        async def one(count: int) -> str:
            stream = await client.chat.completions.create(
                model="scripted", messages=MESSAGES, max_tokens=count, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        found = await asyncio.gather(*(one(count) for count in range(1, 9)))
        assert found == ["".join(f"<{i}>" for i in range(count)) for count in range(1, 9)]
        whole = await client.completions.create(model="scripted", prompt="hello", max_tokens=2)
        assert whole.choices[0].text == "<0><1>"


def test_several_prompts_and_several_choices(service: Service, client: OpenAI) -> None:
    found = client.completions.create(model="scripted", prompt=["hello", "world"], n=2, max_tokens=1, seed=5)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None and (found.usage.prompt_tokens, found.usage.completion_tokens) == (6, 4)
    asked = sorted((request.request_id[-1], request.seed) for request in service.generator.requests)
    assert asked == [("0", 5), ("1", 6), ("2", 5), ("3", 6)]
    chunks = list(client.chat.completions.create(model="scripted", messages=MESSAGES, n=3, max_tokens=2, stream=True))
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "<0><1>"
        assert own[-1].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6], [7]]])
def test_prompts_of_token_ids(service: Service, client: OpenAI, prompt: Any) -> None:
    client.completions.create(model="scripted", prompt=prompt, max_tokens=1)
    asked = sorted(request.prompt_token_ids or () for request in service.generator.requests)
    assert asked == sorted(map(tuple, prompt) if isinstance(prompt[0], list) else [tuple(prompt)])


def test_logprobs_of_a_completion(client: OpenAI) -> None:
    found = client.completions.create(model="scripted", prompt="hello", max_tokens=3, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert TEXT.tokenizer is not None
    names = [TEXT.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(3)]
    assert logprobs.tokens == names
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, len(names[0]), len(names[0] + names[1])]
    assert all(names[0] in top and names[1] in top for top in logprobs.top_logprobs)
    streamed = list(client.completions.create(model="scripted", prompt="hello", max_tokens=3, logprobs=2, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [part.tokens[0] for part in parts if part and part.tokens] == names
    assert [part.text_offset[0] for part in parts if part and part.text_offset] == [0, 3, 6]  # of "<0><1><2>"


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.25, -0.25]
    first = logprobs.content[0]
    assert first.bytes == list(first.token.encode()) and len(first.top_logprobs) == 2
    assert [entry.logprob for entry in first.top_logprobs] == [0.0, -0.5]
    plain = client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=2, logprobs=True)
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.content is not None
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (InvalidRequestError("prompt_token_ids", "must not be so"), openai.BadRequestError, 400),
        (CapacityError("the queue is full", retry_after_ms=2500), openai.RateLimitError, 429),
        (UnavailableError("no target"), openai.InternalServerError, 503),
        (RuntimeError("a bug"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_any_output_has_a_status(
    service: Service, client: OpenAI, error: Exception, kind: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    service.generator.error = error
    with pytest.raises(kind) as caught:
        list(client.chat.completions.create(model="scripted", messages=MESSAGES, stream=stream))
    assert caught.value.status_code == status
    if status == 400:
        assert caught.value.param == "messages" and "must not be so" in str(caught.value)
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "3"


def test_an_error_in_the_middle_of_a_stream_is_an_event(service: Service, client: OpenAI) -> None:
    service.generator.error, service.generator.error_after = UnavailableError("the target is gone"), 2
    texts = []
    with pytest.raises(openai.APIError, match="the target is gone"):
        for chunk in client.completions.create(model="scripted", prompt="hello", max_tokens=9, stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == ["<0>", "<1>"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"prompt": "", "extra_body": {"add_special_tokens": False}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
        ({"extra_body": {"acceptance_method": "hope"}}, "acceptance_method"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    ],
)
def test_a_bad_field_is_named(service: Service, client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "scripted", "prompt": "hello", **options})
    assert caught.value.param is not None and caught.value.param.startswith(param)
    assert not service.generator.requests


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required", "tools": [{}]}, "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "continue_final_message"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(service: Service, client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, **options})
    assert caught.value.param is not None and caught.value.param.startswith(param)
    assert not service.generator.requests


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.completions.create(model="other", prompt="hello")


LANGCHAIN = "langchain_openai"
"""Package of the dev extra: in CI it is there, and an older environment may lack it."""


def test_a_chat_model_of_langchain_answers_whole_and_streamed(service: Service, gateway: Gateway) -> None:
    in_ci = os.environ.get("CI")
    langchain: Any = importlib.import_module(LANGCHAIN) if in_ci else pytest.importorskip(LANGCHAIN)
    model = langchain.ChatOpenAI(base_url=f"{gateway.url}/v1", api_key="none", model="scripted", max_tokens=3)
    assert model.invoke([("system", "Be brief."), ("human", "hi")]).content == "<0><1><2>"
    chunks = list(model.stream("hi"))
    assert "".join(chunk.content for chunk in chunks) == "<0><1><2>"
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in told] in ([], [3])
    assert model.bind(stop=["x"], seed=3).invoke("hi").response_metadata["finish_reason"] == "length"
    assert service.generator.requests[-1].stop == ("x",)


def test_a_completion_model_answers_a_batch(gateway: Gateway) -> None:
    in_ci = os.environ.get("CI")
    langchain: Any = importlib.import_module(LANGCHAIN) if in_ci else pytest.importorskip(LANGCHAIN)
    model = langchain.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", model="scripted", max_tokens=2)
    assert model.invoke("hello") == "<0><1>"
    assert model.batch(["a", "b", "c"]) == ["<0><1>"] * 3
    assert "".join(model.stream("hello")) == "<0><1>"
