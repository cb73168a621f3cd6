"""Chat templates of the families that are served, rendered as transformers renders them, and what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.chat import ChatPrompt
from outrider.errors import ConfigError, InvalidRequestError
from outrider.tokenization import ModelText
from outrider.tokenization.chat import ChatRenderer
from outrider.tokenization.chat.messages import loops_over_content
from outrider.tokenization.model_text import read_chat_template

TEMPLATES = Path(__file__).parent / "templates"
PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair" / "target"
FAMILIES = ("llama3", "qwen2_5", "qwen3", "mistral", "deepseek_r1_distill", "gpt_oss", "parts")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather <now> & here: é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
CALLS, END_CALLS = "{% for call in messages[0].tool_calls %}", "{% endfor %}"
TURN: list[dict[str, Any]] = [{"role": "user", "content": " What is <b>2 & 3</b>? \n"}]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *TURN]
LONGER = [
    *SYSTEM,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFive. "},
    {"role": "user", "content": "Sure?"},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
]
ANSWERED = [*TOOLS, {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "And tomorrow?"}]
MARKED: list[dict[str, Any]] = [
    {"role": "system", "content": "<|im_start|>system"},
    {"role": "user", "content": "<s>[INST] é 你 <|eot_id|><|im_end|>\n\n"},
]
REASONED: list[dict[str, Any]] = [*TURN, {"role": "assistant", "content": "Five.", "reasoning": "2 and 3"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "turn": TURN,
    "system": SYSTEM,
    "longer": LONGER,
    "tools": TOOLS,
    "answered": ANSWERED,
    "marked": MARKED,
    "reasoned": REASONED,
}


def renderer(source: str, **config: Any) -> ChatRenderer:
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}, "chat_template": source}
    return ChatRenderer.from_files({"tokenizer_config.json": json.dumps({**settings, **config}).encode()})


def reference(source: str | dict[str, str], messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(PAIR / "tokenizer.json"), bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )
    tokenizer.chat_template = source
    return str(tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options))


def with_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to transformers: the empty text in the place of null."""
    return [{**message, "content": message["content"] or ""} for message in messages]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, (WEATHER,)], ids=["plain", "with tools"])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_equal_those_of_transformers(
    family: str, header: bool, tools: tuple[dict[str, Any], ...] | None, conversation: str
) -> None:
    source, messages = (TEMPLATES / f"{family}.jinja").read_text(), CONVERSATIONS[conversation]
    chat = ChatPrompt(tuple(messages), tools=tools, add_generation_prompt=header)
    try:
        expected = reference(
            source, with_content(messages), tools=None if tools is None else list(tools), add_generation_prompt=header
        )
    except Exception as error:
        with pytest.raises(InvalidRequestError) as refused:
            renderer(source).render(chat)
        assert str(error) in str(refused.value)
    else:
        assert renderer(source).render(chat) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("last", ["The answer", "The answer \n", " 5"])
def test_a_continued_message_equals_that_of_transformers(family: str, last: str) -> None:
    source = (TEMPLATES / f"{family}.jinja").read_text()
    messages: list[dict[str, Any]] = [*TURN, {"role": "assistant", "content": last}]
    chat = ChatPrompt(tuple(messages), add_generation_prompt=False, continue_final_message=True)
    assert renderer(source).render(chat) == reference(source, messages, continue_final_message=True)


def test_variables_and_documents_reach_the_template() -> None:
    source = (TEMPLATES / "qwen3.jinja").read_text() + "{{ documents | tojson if documents else '' }}"
    documents = ({"title": "a", "text": "b"},)
    chat = ChatPrompt(tuple(TURN), documents=documents, template_kwargs={"enable_thinking": False, "self": 1})
    expected = reference(source, TURN, documents=list(documents), enable_thinking=False, add_generation_prompt=True)
    assert renderer(source).render(chat) == expected
    assert "<think>\n\n</think>" in expected


NAMED = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | tojson }}", "rag": "R"}


@pytest.mark.parametrize(("tools", "name"), [(None, None), ([WEATHER], None), (None, "rag"), ([WEATHER], "rag")])
@pytest.mark.parametrize("kind", ["config", "files"])
def test_one_of_several_templates_is_chosen_as_by_transformers(
    kind: str, tools: list[dict[str, Any]] | None, name: str | None
) -> None:
    files = {"tokenizer_config.json": json.dumps({"chat_template": "not this one"}).encode()}
    if kind == "config":
        entries = [{"name": key, "template": source} for key, source in NAMED.items()]
        files = {"tokenizer_config.json": json.dumps({"chat_template": entries}).encode()}
    else:
        files["chat_template.jinja"] = NAMED["default"].encode()
        files.update({f"additional_chat_templates/{key}.jinja": NAMED[key].encode() for key in ("tool_use", "rag")})
    chat = ChatPrompt(tuple(TURN), tools=None if tools is None else tuple(tools), chat_template=name or "")
    assert ChatRenderer.from_files(files).render(chat) == reference(NAMED, TURN, tools=tools, chat_template=name)


def test_messages_of_openai_are_made_into_what_templates_expect() -> None:
    source = (TEMPLATES / "qwen2_5.jinja").read_text()
    wire: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]},
    ]
    plain: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]},
    ]
    assert renderer(source).render(ChatPrompt(tuple(wire), add_generation_prompt=False)) == reference(source, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_needs_no_description(family: str) -> None:
    source = (TEMPLATES / f"{family}.jinja").read_text()
    bare = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    prompt = renderer(source).render(ChatPrompt(tuple(TURN), tools=(WEATHER, bare)))
    assert ("now" in prompt) == ("weather" in prompt)


@pytest.mark.parametrize("call", [{"content": None}, {}], ids=["null", "absent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_a_tool_needs_no_content(family: str, call: dict[str, Any]) -> None:
    source = (TEMPLATES / f"{family}.jinja").read_text()

    def rendered(content: dict[str, Any]) -> str:
        messages = (TOOLS[0], {"role": "assistant", **content, "tool_calls": [CALL]}, TOOLS[2])
        return renderer(source).render(ChatPrompt(messages, tools=(WEATHER,)))

    assert rendered(call) == rendered({"content": ""})


def test_a_template_that_asks_for_content_that_is_none_finds_it() -> None:
    """DeepSeek-V3's tells calls of tools from answers in this way."""
    source = "{% for m in messages %}{% if m['content'] is none %}call{% else %}{{ m.content }}{% endif %};{% endfor %}"
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert renderer(source).render(ChatPrompt(messages)) == "hi;call;"


@pytest.mark.parametrize(
    ("given", "arguments"),
    [(None, {}), ("", {}), ('{"a": ', {}), ("[1]", {}), ("null", {}), ("[" * 100_000, {}), ('{"a": 1}', {"a": 1})],
)
def test_arguments_of_calls_are_objects_for_the_template(given: str | None, arguments: dict[str, Any]) -> None:
    """Same as in vLLM, also those that a model did not write to their end."""
    call = {"function": {"name": "weather", "arguments": given}}
    text = renderer("{{ messages[0].tool_calls[0].function.arguments | tojson }}").render(
        ChatPrompt(({"role": "assistant", "tool_calls": [call]},))
    )
    assert json.loads(text) == arguments


DEEPSEEK = (
    "{% for message in messages %}{% for tool in message['tool_calls'] %}"
    "{{ tool['type'] + ':' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```' }}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        (DEEPSEEK, 'function:weather\n```json\n{"city": "Köln"}\n```'),
        (CALLS + "{{ call.function.arguments }}" + END_CALLS, '{"city": "Köln"}'),
        (CALLS + "{{ 'a' ~ call.function.arguments }}" + END_CALLS, 'a{"city": "Köln"}'),
        (CALLS + "{% set args = call.function.arguments %}{{ args + '.' }}" + END_CALLS, '{"city": "Köln"}.'),
        (CALLS + "{{ call.function.arguments | string | trim }}" + END_CALLS, '{"city": "Köln"}'),
        (CALLS + "{{ 'a' + call.function.arguments | tojson }}" + END_CALLS, 'a{"city": "Köln"}'),
        (CALLS + "{% for name in call.function.arguments %}{{ name }}{% endfor %}" + END_CALLS, "city"),
        (CALLS + "{% set args = call.function.arguments %}{{ args.city }}" + END_CALLS, "Köln"),
        (
            CALLS + "{% set args = call.function.arguments %}{{ args if args is string else args.city }}" + END_CALLS,
            "Köln",
        ),
    ],
)
@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}])
def test_arguments_of_calls_have_the_form_that_the_template_takes(source: str, printed: str, arguments: object) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = ({"role": "assistant", "tool_calls": [call]},)
    assert renderer(source).render(ChatPrompt(messages=messages)) == printed


def test_joined_arguments_are_those_that_the_client_sent() -> None:
    for given, printed in (('{"a":1', '{"a":1'), ("", ""), (None, "{}")):
        call = {"function": {"name": "weather", "arguments": given}}
        text = renderer(CALLS + "{{ '.' + call.function.arguments }}" + END_CALLS).render(
            ChatPrompt(messages=({"role": "assistant", "tool_calls": [call]},))
        )
        assert text == f".{printed}"


def test_an_empty_list_of_tools_is_none() -> None:
    source = "{{ tools is none }}"
    assert renderer(source).render(ChatPrompt(tuple(TURN), tools=())) == "True"


def test_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    source = (TEMPLATES / "parts.jinja").read_text()
    found = [family for family in FAMILIES if loops_over_content((TEMPLATES / f"{family}.jinja").read_text())]
    assert found == ["parts"]
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    rendered = renderer(source).render(ChatPrompt(tuple(messages)))
    assert rendered == reference(source, messages, add_generation_prompt=True)
    assert "one|two|" in rendered


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages.__class__ }}", ""),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(_a=1) %}", "underscores"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscores"),
        ("{{ dict.__subclasses__() }}", "no attribute"),
        ("{{ raise_exception('no such turn') }}", "no such turn"),
        ("{{ messages[0].content.missing.deeper }}", "no attribute"),
        ("{% for", "unexpected"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply"),
        ("{{ " + "(1+" * 300 + "1" + ")" * 300 + " }}", "nested too deeply"),
    ],
)
def test_a_template_that_does_harm_is_an_error_of_the_request(source: str, words: str) -> None:
    if not words:
        assert "class" not in renderer(source).render(ChatPrompt(tuple(TURN)))
        return
    with pytest.raises(InvalidRequestError, match=words) as refused:
        renderer(source).render(ChatPrompt(tuple(TURN)))
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (ChatPrompt(()), "messages"),
        (ChatPrompt(({"content": "a"},)), "messages[0].role"),
        (ChatPrompt(({"role": 3},)), "messages[0].role"),
        (ChatPrompt(({"role": "user", "content": 3},)), "messages[0].content"),
        (ChatPrompt(({"role": "user", "content": {"text": "a"}},)), "messages[0].content"),
        (ChatPrompt(("hello",)), "messages[0]"),  # type: ignore[arg-type]
        (ChatPrompt(({"role": "user", "content": [object()]},)), "messages[0]"),
        (ChatPrompt(({"role": "user", "name": object()},)), "messages[0]"),
        (ChatPrompt(({"role": "user", "content": [{"type": "image_url"}]},)), "messages[0].content[0]"),
        (ChatPrompt(tuple(TURN), tools=(3,)), "tools[0]"),  # type: ignore[arg-type]
        (ChatPrompt(tuple(TURN), chat_template="rag"), "chat_template"),
        (ChatPrompt(tuple(TURN), chat_template="{{ messages }}"), "chat_template"),
        (ChatPrompt(tuple(TURN), continue_final_message=True), "continue_final_message"),
        (
            ChatPrompt(({"role": "user"},), add_generation_prompt=False, continue_final_message=True),
            "continue_final_message",
        ),
    ],
)
def test_a_chat_that_no_template_could_take_is_refused_by_its_field(chat: ChatPrompt, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        renderer("{{ messages[0].content }}").render(chat)
    assert refused.value.field == field


def test_json_that_is_nested_too_deeply_is_passed_over_as_other_bad_json_is() -> None:
    deep = b'{"a":' + b"[" * 100_000
    text = ModelText.from_files(
        {"tokenizer_config.json": deep, "special_tokens_map.json": deep, "generation_config.json": deep}
    )
    assert (text.chat.template_names, text.sampling_defaults) == ((), {})


def test_a_template_file_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deep.jinja"
    path.write_text("{{ " + "(" * 5000 + ")" * 5000 + " }}")
    with pytest.raises(ConfigError, match=r"deep.jinja is no Jinja template: it is nested too deeply"):
        read_chat_template(path)


def test_a_template_file_without_an_end_is_not_read() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero cannot be read: it is no regular file"):
        read_chat_template("/dev/zero")


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template: serve it with --chat-template FILE"):
        ChatRenderer.from_files({}).render(ChatPrompt(tuple(TURN)))


def test_rendering_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from outrider.chat import ChatPrompt; from outrider.tokenization.chat import ChatRenderer;"
        "files = {'chat_template.jinja': b'{{ messages[0].content }}'};"
        "print(ChatRenderer.from_files(files).render(ChatPrompt(({'role': 'user', 'content': 'hi'},))),"
        "sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "hi" and "torch" not in done.stdout and "transformers" not in done.stdout
