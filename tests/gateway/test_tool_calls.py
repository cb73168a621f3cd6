"""Tool calls and reasoning over HTTP, with the real ``openai`` and LangChain clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, SecretStr

from outrider.tokenization import ModelText
from outrider.types import GrammarKind
from tests.client.conftest import Service
from tests.gateway.conftest import FILES, Gateway

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}{{ tools | tojson if tools }}{{ '<think>' if enable_thinking }}{{ '</think>' if false }}"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
CALL = ["<think>", "I look.", "</think>\n\n", "<tool", "_call>\n", '{"name": "get_', 'weather", "argu', 'ments": {"ci']
CALL += [
    'ty": "Zü',
    'rich"}}\n</',
    "tool_call>",
    '\n<tool_call>{"name": "get_weather",',
    ' "arguments": {"city": "Bern"}}',
]
CALL += ["\n</tool_call>"]
ARGUMENTS = [{"city": "Zürich"}, {"city": "Bern"}]


@pytest.fixture
def service(service: Service) -> Service:
    text = ModelText.from_files({**FILES, "chat_template.jinja": TEMPLATE.encode()}, bos_token_id=0)
    service.generator.tokenizer = text.files
    service.generator.texts = CALL
    return service


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_calls_and_reasoning_of_a_whole_answer(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    calls: Any = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS
    assert {call.function.name for call in calls} == {"get_weather"} and len({call.id for call in calls}) == 2
    extra = choice.message.model_extra or {}
    assert extra["reasoning_content"] == extra["reasoning"] == "I look."


def test_calls_and_reasoning_of_a_stream(client: OpenAI) -> None:
    chunks = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS, stream=True)
    deltas = [chunk.choices[0] for chunk in chunks]
    assert deltas[-1].finish_reason == "tool_calls"
    assert "".join((choice.delta.model_extra or {}).get("reasoning_content", "") for choice in deltas) == "I look."
    found: dict[int, str] = {}
    for call in [call for choice in deltas for call in choice.delta.tool_calls or ()]:
        assert call.function is not None
        is_first = call.index not in found
        assert (call.id is not None, call.type, call.function.name) == (
            (True, "function", "get_weather") if is_first else (False, None, None)
        )
        found[call.index] = found.get(call.index, "") + (call.function.arguments or "")
    assert [json.loads(text) for text in found.values()] == ARGUMENTS and list(found) == [0, 1]


def test_the_streaming_helper_of_the_client(client: OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    calls: Any = final.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS


def test_one_call_without_parallel_ones(client: OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    calls: Any = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS[:1]
    chunks = client.chat.completions.create(**asked, stream=True)
    assert {call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()} == {0}


@pytest.mark.parametrize("asked", ({"tools": TOOLS, "tool_choice": "none"}, {}))
def test_no_calls_are_parsed_where_none_may_be(client: OpenAI, asked: Any) -> None:
    (choice,) = client.chat.completions.create(model="scripted", messages=MESSAGES, **asked).choices
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert choice.message.content == "".join(CALL[3:])


def test_an_answer_that_is_cut_says_so(client: OpenAI) -> None:
    found = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS, max_tokens=9)
    (choice,) = found.choices
    calls: Any = choice.message.tool_calls
    assert choice.finish_reason == "length" and [call.function.arguments for call in calls] == ['{"city": "Zü']


def test_reasoning_is_left_out_on_request(client: OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": MESSAGES, "extra_body": {"include_reasoning": False}}
    message = client.chat.completions.create(**asked).choices[0].message
    assert not {"reasoning", "reasoning_content"} & (message.model_extra or {}).keys()


def test_a_prompt_that_opens_the_reasoning(service: Service, client: OpenAI) -> None:
    service.generator.texts = ["I ", "see", "</think>", "\n\nYes."]
    thinking: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    for asked in (thinking, {"reasoning_effort": "high"}):
        found = client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body=asked)
        message = found.choices[0].message
        assert (message.content, (message.model_extra or {})["reasoning"]) == ("Yes.", "I see")


def test_results_of_tools_reach_the_next_prompt(service: Service, client: OpenAI) -> None:
    first = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS).choices[0].message
    calls: Any = first.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    messages: Any = [*MESSAGES, first.model_dump(exclude_none=True), *results]
    client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    tokenizer = ModelText.from_files(FILES, bos_token_id=0).tokenizer
    assert tokenizer is not None
    ids = service.generator.requests[1].prompt_token_ids
    assert ids is not None
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.count('"arguments": {"city"') == 2 and prompt.count("<tool>sunny") == 2


def test_langchain_binds_tools(gateway: Gateway) -> None:
    class GetWeather(BaseModel):
        """Weather of a city."""

        city: str

    model = ChatOpenAI(model="scripted", base_url=f"{gateway.url}/v1", api_key=SecretStr("none"), max_retries=0)
    found = model.bind_tools([GetWeather]).invoke("Weather?")
    assert isinstance(found, AIMessage) and [call["args"] for call in found.tool_calls] == ARGUMENTS


def test_a_grammar_holds_after_reasoning_that_the_prompt_opens(service: Service, client: OpenAI) -> None:
    service.generator.texts = ["I see", "</think>", '{"city": ', '"Bern"}']
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    asked: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "tool_choice": named}
    for thinks, after in ((True, "</think>"), (False, "")):
        options = {"chat_template_kwargs": {"enable_thinking": thinks}}
        if not thinks:  # neither the template nor the model opens it, which the model might
            service.generator.texts = service.generator.texts[2:]
        message = client.chat.completions.create(**asked, extra_body=options).choices[0].message
        calls: Any = message.tool_calls
        assert json.loads(calls[0].function.arguments) == {"city": "Bern"}
        assert (message.model_extra or {}).get("reasoning") == ("I see" if thinks else None)
        grammar = service.generator.requests[-1].sampling.grammar
        assert grammar is not None and grammar.after == after
        assert grammar.kind is (GrammarKind.JSON_SCHEMA if thinks else GrammarKind.LARK)
    service.generator.texts = ["<thi", "nk>Hm", "</think>\n", '\n{"city": ', '"Bern"}']
    message = client.chat.completions.create(**asked).choices[0].message
    calls = message.tool_calls
    assert json.loads(calls[0].function.arguments) == {"city": "Bern"}
    assert (message.model_extra or {}).get("reasoning") == "Hm"


def strict(parameters: Any) -> Any:
    return [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True, "parameters": parameters}}]


def grammar_of(service: Service) -> Any:
    return service.generator.requests[-1].sampling.grammar


def test_strict_tools_constrain_the_calls_that_a_model_chooses_to_make(service: Service, client: OpenAI) -> None:
    parameters = TOOLS[0]["function"]["parameters"]
    for choice in ("auto", "none"):
        client.chat.completions.create(
            model="scripted", messages=MESSAGES, tools=strict(parameters), tool_choice=choice
        )
        found = grammar_of(service)
        assert (found is None) == (choice == "none")
    client.chat.completions.create(model="scripted", messages=MESSAGES, tools=strict(parameters))
    assert grammar_of(service).text.startswith("%llguidance") and "get_weather" in grammar_of(service).text
    client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS)
    assert grammar_of(service) is None


def test_an_answer_with_a_schema_leaves_a_model_the_choice_to_call(service: Service, client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "response_format": wanted}
    made = client.chat.completions.create(**asked)
    assert made.choices[0].message.tool_calls
    assert '"sum"' in grammar_of(service).text and "get_weather" in grammar_of(service).text
    client.chat.completions.create(**asked, tool_choice="none")
    assert '"sum"' in grammar_of(service).text and "get_weather" not in grammar_of(service).text


def test_free_text_and_reasoning_stay_as_they_are_beside_strict_tools(service: Service, client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        tools=strict(TOOLS[0]["function"]["parameters"]),
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message: Any = made.choices[0].message
    assert message.reasoning_content.endswith("I look.")
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == ARGUMENTS
    assert grammar_of(service).after == "</think>"


def test_a_strict_schema_that_is_none_is_named(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, tools=strict("none"))
    assert caught.value.param == "tools[0].function.parameters"
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(
            model="scripted",
            input="hi",
            tools=[{"type": "function", "name": "f", "strict": True, "parameters": "none"}],  # type: ignore[typeddict-item]
        )
    assert caught.value.param == "tools[0].parameters"


@pytest.mark.parametrize("choice", ("auto", "required"))
@pytest.mark.parametrize("kind", ("string", ["array", "null"]))
def test_arguments_that_are_no_object_are_refused(client: OpenAI, choice: Any, kind: object) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    with pytest.raises(BadRequestError, match="must have the type object") as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools, tool_choice=choice)
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("is_strict", (False, True))
def test_arguments_without_a_type_are_an_object(service: Service, client: OpenAI, *, is_strict: bool) -> None:
    function = {"name": "f", "strict": is_strict, "parameters": {"properties": {"a": {"type": "integer"}}}}
    tools: Any = [{"type": "function", "function": function}]
    client.chat.completions.create(
        model="scripted", messages=MESSAGES, tools=tools, tool_choice="auto" if is_strict else "required"
    )
    assert '"type": "object"' in grammar_of(service).text.split('"properties": {"a"')[1]
