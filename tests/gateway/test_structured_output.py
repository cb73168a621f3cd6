"""Fields of HTTP requests that constrain the output, and what the coordinator is asked for them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from outrider.errors import InvalidRequestError
from outrider.gateway.protocol.tool_grammars import arguments_schema, calls_schema
from outrider.structured_output import Outcome
from outrider.tokenization import ModelText
from outrider.tokenization.output_parsing import AnswerGrammar, OutputFormat
from outrider.types import Grammar, GrammarKind
from tests.client.conftest import Service
from tests.gateway.conftest import FILES, Gateway
from tests.structured_output.vocabularies import EOS, ids, matcher

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {**SCHEMA, "$defs": {"n": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    (
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": FORMAT}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar(GrammarKind.LARK, "start: /a/")),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"guided_grammar": "start: /a/"}, Grammar(GrammarKind.LARK, "start: /a/")),
    ),
)
def test_every_field_reaches_the_coordinator(
    service: Service, client: OpenAI, fields: Any, expected: Grammar | None
) -> None:
    client.completions.create(model="scripted", prompt="hello", max_tokens=1, extra_body=fields)
    client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=1, extra_body=fields)
    assert [request.sampling.grammar for request in service.generator.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    (
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": [3]}, "guided_choice[0]"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "auto", "tools": TOOLS}, "tool_choice"),
        ({"tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "add", "parameters": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}], "tool_choice": "required"}, "tools[0].function"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": FORMAT}, "response_format.json_schema.schema"),
    ),
)
def test_what_is_malformed_is_refused_by_its_field(client: OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body=fields)
    assert caught.value.param == param


def test_refused_tools_are_named_as_clients_look_for_them(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"tool calling is not supported.* --tool-call-parser"):
        client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    (
        ({"guided_json": json.dumps(SCHEMA)}, '{"a": 1}', '{"a": "b"}'),
        ({"guided_json": SCHEMA}, '{"a": 1}', '{"a": "b"}'),
        ({"guided_regex": "[0-9]+"}, "12", "a"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
        ({"guided_grammar": "start: /a+/"}, "aa", "b"),
    ),
)
def test_every_kind_of_grammar_holds_after_reasoning(
    service: Service, client: OpenAI, fields: Any, right: str, wrong: str
) -> None:
    template = "{{ messages[0].content }}{{ '</think>' if false }}"
    files = {**FILES, "chat_template.jinja": template.encode()}
    service.generator.tokenizer = ModelText.from_files(files, bos_token_id=0).files
    service.generator.texts = ["<think>Hm", "</think>\n\n", right]
    message = client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body=fields).choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning"]) == (right, "Hm")
    grammar = service.generator.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.LARK
    for begin in ("", "<think>Hm</think>\n\n"):
        for output, outcome in ((right, Outcome.ENDED), (wrong, Outcome.REFUSED)):
            assert matcher("lark", grammar.text).follow([*ids(begin + output), EOS]) is outcome, begin


@pytest.mark.parametrize(
    "given",
    (
        {"choice": "yes"},
        {"choice": 1},
        {"choice": {"yes": 1}},
        {"choice": [1]},
        {"choice": []},
        {"regex": ["a"]},
        {"grammar": 3},
    ),
)
def test_a_value_of_a_wrong_type_is_refused_after_reasoning_too(service: Service, client: OpenAI, given: Any) -> None:
    files = {**FILES, "chat_template.jinja": b"{{ messages[0].content }}{{ '</think>' if false }}"}
    service.generator.tokenizer = ModelText.from_files(files, bos_token_id=0).files
    with pytest.raises(BadRequestError, match=r"must be a (list of texts, at least one|text, not)") as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body={"structured_outputs": given})
    assert caught.value.param == f"structured_outputs.{next(iter(given))}"


@pytest.mark.parametrize("choice", ("required", {"type": "function", "function": {"name": "add"}}))
def test_calls_are_enforced_on_channels_after_the_analysis(service: Service, client: OpenAI, choice: Any) -> None:
    template = (
        "{{ '<|start|>user<|message|>' + messages[0].content + '<|start|>assistant' }}{{ '<|channel|>' if false }}"
    )
    files = {**FILES, "chat_template.jinja": template.encode()}
    service.generator.tokenizer = ModelText.from_files(files, bos_token_id=0).files
    service.generator.texts = ["<|channel|>analysis<|message|>Hm", ".<|end|><|start|>assistant<|channel|>comment"]
    service.generator.texts += ["ary to=functions.add <|constrain|>json<|message|>", '{"a": 1}']
    asked: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    made = client.chat.completions.create(**asked).choices[0]
    calls: Any = made.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", '{"a": 1}')]
    assert (made.message.model_extra or {})["reasoning"] == "Hm." and made.finish_reason == "tool_calls"
    grammar = service.generator.requests[0].sampling.grammar
    assert grammar is not None and "to=functions." in grammar.text
    assert ("now" in grammar.text) == (choice == "required")


def test_errors_of_the_coordinator_name_the_field_of_the_request(service: Service, client: OpenAI) -> None:
    service.generator.error = InvalidRequestError("json_schema", "/properties/a/not is not supported")
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body={"response_format": FORMAT})
    assert caught.value.param == "response_format.json_schema.schema" and "/properties/a/not" in str(caught.value)


def test_a_named_tool_is_enforced(service: Service, client: OpenAI) -> None:
    service.generator.texts = ['{"a"', ": 1}"]
    asked: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS}
    asked["tool_choice"] = {"type": "function", "function": {"name": "add"}}
    (choice,) = client.chat.completions.create(**asked).choices
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", '{"a": 1}')]
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    grammar = service.generator.requests[0].sampling.grammar
    assert grammar is not None
    wanted = {**TOOLS[0]["function"]["parameters"], "$comment": "path in the request: tools[0].function.parameters"}
    assert json.loads(grammar.text) == wanted


@pytest.mark.parametrize("parallel", (True, False))
def test_some_tool_is_enforced(service: Service, client: OpenAI, *, parallel: bool) -> None:
    service.generator.texts = [
        '[{"name": "add", "param',
        'eters": {"a": 1}}, {"name"',
        ': "now", "parameters": {}}',
        "]",
    ]
    asked: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    with client.chat.completions.stream(**asked, parallel_tool_calls=parallel) as stream:
        choice = stream.get_final_completion().choices[0]
    calls: Any = choice.message.tool_calls
    found = [(call.function.name, call.function.arguments) for call in calls]
    assert found == [("add", '{"a": 1}'), ("now", "{}")][: 2 if parallel else 1]
    assert choice.finish_reason == "tool_calls"
    grammar = service.generator.requests[0].sampling.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == ["add", "now"]
    assert schema.get("maxItems") == (None if parallel else 1)


def test_calls_of_tools_whose_definitions_have_the_same_name() -> None:
    """Each tool's references are to its own schema."""
    of_item: dict[str, Any] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Item"}}, "required": ["x"]}
    of_tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    given = {
        "number": {**of_item, "$defs": {"Item": {"type": "integer"}}},
        "word": {**of_item, "$defs": {"Item": {"enum": ["yes"]}}},
        "tree": of_tree,
    }
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in given.items()]
    schema = calls_schema(tools, is_parallel=True)
    for name, parameters, is_valid in (
        ("number", {"x": 1}, True),
        ("number", {"x": "yes"}, False),
        ("word", {"x": "yes"}, True),
        ("word", {"x": 1}, False),
        ("tree", {"left": {"left": {}}}, True),
        ("tree", {"left": [{"name": "tree", "parameters": {}}]}, False),
    ):
        calls: Any = [{"name": name, "parameters": parameters}]
        following = matcher("json_schema", schema)
        assert (following.follow([*ids(json.dumps(calls)), EOS]) is Outcome.ENDED) is is_valid, calls
        assert jsonschema.Draft202012Validator(schema).is_valid(calls) is is_valid, calls


def test_parameters_that_are_nested_too_deeply() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        calls_schema([{"function": {"name": "f", "parameters": schema}}], is_parallel=True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_of_an_enforced_call_that_are_no_schema(client: OpenAI, choice: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": "none"}}]
    with pytest.raises(BadRequestError, match="must be an object, not str") as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools, tool_choice=choice)
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("name", ("", "f"))
def test_paths_of_parameters_of_enforced_calls_are_those_of_the_request(name: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    schema = arguments_schema(tools, name) if name else calls_schema(tools, is_parallel=True)
    text = OutputFormat(None, "qwen3").output_grammar((), lambda _: None, AnswerGrammar(schema, "tool_choice"))
    assert text is not None
    for kind, grammar in (("json_schema", schema), ("lark", text)):
        with pytest.raises(InvalidRequestError, match=r" tools\[0\].function.parameters/properties/a/contains is not"):
            matcher(kind, grammar)


def test_the_path_in_the_schema_of_an_answer_is_said_once() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    text = OutputFormat(None, "qwen3").output_grammar((), lambda _: None, AnswerGrammar(schema, "response_format"))
    assert text is not None
    with pytest.raises(InvalidRequestError, match=": /properties/a/contains is not supported"):
        matcher("lark", text)
