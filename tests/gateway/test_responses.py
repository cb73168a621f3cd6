"""``/v1/responses`` with the real ``openai`` and LangChain clients: text, structured text, calls, reasoning, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel, SecretStr

from outrider.errors import CapacityError, UnavailableError
from outrider.tokenization import ModelText
from outrider.types import GrammarKind
from tests.client.conftest import Service
from tests.gateway.conftest import FILES, Gateway
from tests.gateway.test_tool_calls import ARGUMENTS, CALL, TEMPLATE

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TEXT = ModelText.from_files({**FILES, "chat_template.jinja": TEMPLATE.encode()}, bos_token_id=0)


class City(BaseModel):
    """A city."""

    city: str


@pytest.fixture
def service(service: Service) -> Service:
    service.generator.tokenizer = TEXT.files
    return service


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(service: Service) -> str:
    ids = service.generator.requests[-1].prompt_token_ids
    assert ids is not None and TEXT.tokenizer is not None
    return TEXT.tokenizer.decode(ids, skip_special_tokens=False)


def outline(response: Response) -> list[Any]:
    """The output without its ids."""
    found: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments))
        elif item.type in ("message", "reasoning"):
            found.append((item.type, "".join(part.text for part in item.content or ())))  # type: ignore[union-attr]
    return found


def test_a_response(service: Service, client: OpenAI) -> None:
    found = client.responses.create(
        model="scripted", input="hi", instructions="Be brief.", max_output_tokens=2, metadata={"a": "b"}, store=True
    )
    assert found.object == "response" and found.id.startswith("resp_")
    assert (found.status, found.output_text) == ("incomplete", "<0><1>")
    assert found.incomplete_details is not None and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None and found.usage.output_tokens == 2 and found.usage.total_tokens > 2
    assert (found.metadata, found.instructions, found.max_output_tokens) == ({"a": "b"}, "Be brief.", 2)
    assert (found.model_extra or {})["store"] is False
    assert prompt_of(service) == "<system>Be brief.<user>hi"


def test_the_stream_is_the_whole_response(service: Service, client: OpenAI) -> None:
    service.generator.texts = CALL
    asked: Any = {"model": "scripted", "input": "Weather?", "tools": [TOOL]}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    last: Any = events[-1]
    assert outline(last.response) == outline(whole)
    assert outline(whole) == [
        ("reasoning", "I look."),
        *(("function_call", "get_weather", json.dumps(each, ensure_ascii=False)) for each in ARGUMENTS),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last.type == "response.completed" and last.response.usage == whole.usage
    for kind, joined in (("reasoning_text", "I look."), ("function_call_arguments", outline(whole)[1][2])):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        done = next(event for event in events if event.type == f"response.{kind}.done")
        own: Any = [delta for delta in deltas if delta.item_id == done.item_id]
        assert "".join(delta.delta for delta in own) == joined
    done_items: Any = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item.id for event in done_items] == [item.id for item in last.response.output]


def test_the_streaming_helper(service: Service, client: OpenAI) -> None:
    service.generator.texts = ['{"city": ', '"Bern"}']
    asked: Any = {"model": "scripted", "input": "Where?", "text_format": City}
    with client.responses.stream(**asked) as stream:
        types = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == City(city="Bern")
    assert types.count("response.output_text.delta") == 2
    grammar = service.generator.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.LARK and '"city"' in grammar.text
    assert client.responses.parse(**asked).output_parsed == City(city="Bern")


def test_an_agent_goes_on_from_its_output(service: Service, client: OpenAI) -> None:
    service.generator.texts = CALL
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    first = client.responses.create(model="scripted", input=items, tools=[TOOL])
    items += [item.to_dict() for item in first.output]
    calls: Any = [item for item in first.output if item.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    service.generator.texts = ["It is sunny."]
    second = client.responses.create(model="scripted", input=items, tools=[TOOL])
    assert second.output_text == "It is sunny." and second.status == "completed"
    prompt = prompt_of(service)
    assert (
        prompt.count("<assistant>") == 1
        and prompt.count('"arguments": {"city"') == 2
        and prompt.count("<tool>sunny") == 2
    )


@pytest.mark.parametrize("choice", ("required", {"type": "function", "name": "get_weather"}))
def test_a_call_is_enforced(service: Service, client: OpenAI, choice: Any) -> None:
    service.generator.texts = ['{"city": "Bern"}']
    if choice == "required":
        service.generator.texts = ['[{"name": "get_weather", "parameters": {"city": "Bern"}}]']
    found = client.responses.create(model="scripted", input="?", tools=[TOOL], tool_choice=choice)
    assert outline(found) == [("function_call", "get_weather", '{"city": "Bern"}')]
    assert service.generator.requests[0].sampling.grammar is not None


def test_logprobs_of_the_output_text(service: Service, client: OpenAI) -> None:
    service.generator.tokenizer = ModelText.from_files(FILES, bos_token_id=0).files
    asked: Any = {"model": "scripted", "input": "hi", "max_output_tokens": 2, "top_logprobs": 2}
    part: Any = client.responses.create(**asked).output[0].content[0]
    assert len(part.logprobs) == 2 and len(part.logprobs[0].top_logprobs) == 2
    events: Any = client.responses.create(**asked, stream=True)
    streamed = [found for event in events if event.type == "response.output_text.delta" for found in event.logprobs]
    assert [found.token for found in streamed] == [found.token for found in part.logprobs]


@pytest.mark.parametrize(
    ("fields", "param"),
    (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": 3}]}, "input[1].content"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"messages": [{"role": "user", "content": "a"}]}}, "messages"),
        ({"extra_body": {"reasoning_effort": "low"}}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ),
)
def test_what_is_not_supported_is_refused_by_its_name(client: OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "scripted", "input": "hi", **fields})
    assert caught.value.param == param


def test_nothing_is_stored(client: OpenAI) -> None:
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            ask("resp_1")


def test_errors_have_a_status_or_end_the_stream(service: Service, client: OpenAI) -> None:
    service.generator.error = CapacityError("full")
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="scripted", input="hi", stream=True)
    service.generator.error = UnavailableError("lost")
    service.generator.error_after = 2
    *_, last = client.responses.create(model="scripted", input="hi", stream=True)
    assert last.type == "response.failed"
    assert (
        last.response.status == "failed" and last.response.error is not None and "lost" in last.response.error.message
    )


def test_langchain_uses_responses(service: Service, gateway: Gateway) -> None:
    service.generator.texts = CALL
    options: Any = {"model": "scripted", "base_url": f"{gateway.url}/v1", "max_retries": 0, "use_responses_api": True}
    model = ChatOpenAI(**options, api_key=SecretStr("none")).bind_tools([TOOL])
    first: Any = model.invoke("Weather?")
    assert [call["args"] for call in first.tool_calls] == ARGUMENTS
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in first.tool_calls]
    service.generator.texts = ["It is ", "sunny."]
    streamed: Any = list(model.stream([HumanMessage("Weather?"), first, *results]))
    assert "".join(chunk.text for chunk in streamed) == "It is sunny."
