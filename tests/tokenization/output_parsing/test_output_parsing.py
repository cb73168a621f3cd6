"""Output parsers: reasoning and tool calls of recorded outputs, whole and cut at every place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.tokenization.output_parsing import Content, OutputFormat, ParsedOutput, choose_format, parse_output
from outrider.tokenization.output_parsing.schema_types import typed_value
from tests.tokenization.output_parsing.recorded import CASES, TOOLS, Case, of

TEMPLATES = Path(__file__).parents[1] / "templates"


def parsed(case: Case, parts: Sequence[str]) -> ParsedOutput:
    parser = case.format.make_parser(TOOLS, case.prompt_end)
    assert parser is not None
    found = ParsedOutput()
    for part in parts:
        for event in parser.push(part):
            found.add(event)
    for event in parser.finish():
        found.add(event)
    return found


def check(case: Case, found: ParsedOutput) -> None:
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == case.calls
    assert (found.content, found.reasoning) == (case.content, case.reasoning)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_whole_output(case: Case) -> None:
    parser = case.format.make_parser(TOOLS, case.prompt_end)
    assert parser is not None
    check(case, parse_output(parser, case.text))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_output_in_two_parts_cut_at_every_place(case: Case) -> None:
    whole = parsed(case, [case.text])
    for cut in range(len(case.text) + 1):
        assert parsed(case, [case.text[:cut], case.text[cut:]]) == whole, case.text[:cut]


@pytest.mark.parametrize("size", (1, 2, 3, 7))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_output_in_small_parts(case: Case, size: int) -> None:
    parts = [case.text[start : start + size] for start in range(0, len(case.text), size)]
    check(case, parsed(case, parts))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_output_that_is_cut_off_gives_a_beginning_of_its_parts(case: Case) -> None:
    for end in range(len(case.text)):
        found = parsed(case, [case.text[:end]])
        assert len(found.calls) <= len(case.calls)
        for call, (name, _) in zip(found.calls, case.calls, strict=False):
            assert call.name == name


def test_arguments_are_streamed_as_they_come() -> None:
    parser = of("hermes").make_parser(TOOLS, "")
    assert parser is not None
    list(parser.push('<tool_call>{"name": "now", "arguments": {"a'))
    assert [event.text for event in parser.push('b": 1')] == ['b": 1']  # type: ignore[union-attr]


def test_an_end_marker_that_is_cut_is_no_content() -> None:
    parser = of("hermes").make_parser(TOOLS, "")
    assert parser is not None
    events = [*parser.push('<tool_call>{"name": "now", "arguments": {}}\n</tool'), *parser.finish()]
    assert not [event for event in events if isinstance(event, Content)]


def test_content_is_streamed_as_it_comes() -> None:
    parser = of("hermes", "qwen3").make_parser(TOOLS, "")
    assert parser is not None
    assert [event.text for event in parser.push("Hello <b")] == ["Hello <b"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("template", "expected"),
    (
        ("qwen2_5", of("hermes")),
        ("qwen3", of("hermes", "qwen3")),
        ("mistral", of("mistral")),
        ("llama3", of("llama3_json")),
        ("deepseek_r1_distill", of("deepseek_v3", "qwen3")),
        ("gpt_oss", of("openai", "openai")),
        ("parts", of()),
    ),
)
def test_the_format_is_that_of_the_template(template: str, expected: OutputFormat) -> None:
    assert choose_format((TEMPLATES / f"{template}.jinja").read_text()) == expected


def test_names_go_before_the_template() -> None:
    template = (TEMPLATES / "qwen3.jinja").read_text()
    assert choose_format(template, "none", "deepseek_r1") == of(None, "deepseek_r1")
    assert choose_format("", "hermes") == of("hermes")
    assert choose_format("<|start|>{{ role }}<|channel|>") == of("openai", "openai")
    assert of().make_parser(TOOLS, "") is None


LIST = ' [ {"name": "get_weather", "parameters": {"city": "a]}, {"}} ,\n{"name": "now", "parameters": {}}]'


@pytest.mark.parametrize("prompt_end", ("", "<think>"))
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    (
        ("", LIST, [("get_weather", {"city": "a]}, {"}), ("now", {})]),
        ("now", ' {"a": [1]}', [("now", {"a": [1]})]),
    ),
)
def test_calls_that_are_enforced_cut_at_every_place(
    name: str, text: str, expected: list[tuple[str, object]], prompt_end: str
) -> None:
    thinks = bool(prompt_end)
    text = f"Hm.</think>{text}" if thinks else text
    for cut in range(len(text) + 1):
        parser = of("hermes", "qwen3").enforced_parser(name, prompt_end)
        found = ParsedOutput()
        for event in (*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()):
            found.add(event)
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == expected
        assert (found.content, found.reasoning) == ("", "Hm." if thinks else "")


def test_blanks_after_reasoning_are_no_part_of_an_enforced_call() -> None:
    for after, expected in (("\n\n", []), ('\n\n{"a": 1}\n', [("now", '{"a": 1}\n')])):
        parser, found = of("hermes", "qwen3").enforced_parser("now", "<think>"), ParsedOutput()
        for event in (*parser.push("Hm.</think>"), *parser.push(after), *parser.finish()):
            found.add(event)
        assert [(call.name, call.arguments) for call in found.calls] == expected


def test_tags_that_are_special_tokens_are_asked_for() -> None:
    assert of("hermes", None).needs_special_tokens("<tool_call>".__eq__)
    assert of(None, "qwen3").needs_special_tokens("</think>".__eq__)
    assert not of("hermes", None).needs_special_tokens("</think>".__eq__)
    assert not of("hermes", "qwen3").needs_special_tokens(lambda _: False)


@pytest.mark.parametrize(
    ("text", "names", "content"),
    (
        ("None.", [], "None."),
        ('[{"name": "now", "parameters": {}}, <', ["now"], "<"),
        ("[]", [], ""),
        ('"now"', [], '"now"'),
    ),
)
def test_an_enforced_list_that_is_none_ends_too(text: str, names: list[str], content: str) -> None:
    found = parse_output(of("hermes").enforced_parser("", ""), text)
    assert ([call.name for call in found.calls], found.content) == (names, content)


def test_a_call_does_not_end_the_reasoning_where_a_grammar_follows_it() -> None:
    text = '<think>So <tool_call>{"name": "now", "arguments": {}}</tool_call></think>Yes.'
    parser = of("hermes", "qwen3").make_parser(TOOLS, "", has_grammar=True)
    assert parser is not None
    found = parse_output(parser, text)
    assert (found.calls, found.content) == ([], "Yes.") and "<tool_call>" in found.reasoning


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    (
        ("3.5", "float", 3.5),
        ("3", "str", "3"),
        ("1e999", "number", "1e999"),
        ("NaN", "number", "NaN"),
        ("[1]", "list", [1]),
    ),
)
def test_values_by_other_names_of_types_and_no_json(text: str, kind: str, value: object) -> None:
    assert typed_value(text, {"type": kind}) == value
