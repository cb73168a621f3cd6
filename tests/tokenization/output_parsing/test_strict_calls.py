"""Grammars of outputs with calls of strict tools: text stays free, and a call that has begun matches its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from outrider.errors import InvalidRequestError
from outrider.structured_output import GrammarCompiler, Matcher, Outcome
from outrider.tokenization.output_parsing import CallArguments, CallStart, OutputFormat
from outrider.types import Grammar, GrammarKind
from tests.structured_output.vocabularies import EOS, FILE, VOCAB_SIZE

SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>")


def _tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(FILE.read_text())
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


TOKENIZER = _tokenizer()
COMPILER = GrammarCompiler(
    {"tokenizer.json": TOKENIZER.to_str().encode()}, vocab_size=VOCAB_SIZE + len(SPECIAL), eos_token_ids=(EOS,)
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("get_weather", WEATHER), tool("note", {"type": "object"}, strict=False)]


def grammar(form: str, tools: list[dict[str, Any]]) -> str | None:
    return OutputFormat(form).strict_calls_grammar(tools, special_token_id)


def special_token_id(text: str) -> int | None:
    return TOKENIZER.token_to_id(text) if text in SPECIAL else None


def matcher(form: str, tools: list[dict[str, Any]] | None = None) -> Matcher:
    found = grammar(form, tools or TOOLS)
    assert found is not None
    return COMPILER.compile(Grammar(GrammarKind.LARK, found), (EOS,))


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def outcome(form: str, text: str, *, ends: bool = False) -> Outcome:
    return matcher(form).follow([*ids(text), *([EOS] if ends else [])])


START, ARGUMENTS = '{"name": "get_weather", "arguments": ', '{"city": "Bern", "days": 3}'
HEAD = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
TAGS = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
CALLS = [
    ("hermes", f"<tool_call>\n{START}{ARGUMENTS}}}\n</tool_call>"),
    ("qwen3_coder", f"{TAGS}<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", f"{TAGS}</function>\n</tool_call>"),
    ("mistral", f"[TOOL_CALLS][{START}{ARGUMENTS}}}]"),
    ("mistral", f"[TOOL_CALLS] [{START}{ARGUMENTS}}}, {START}{ARGUMENTS}}}]"),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),
    ("openai", f"{HEAD}{ARGUMENTS}"),
    ("openai", f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}"),
]
ANALYSIS = "<|channel|>analysis<|message|>Let me see: {}.<|end|><|start|>assistant"
TEXTS = {"openai": ANALYSIS}


@pytest.mark.parametrize(("form", "call"), CALLS)
def test_calls_and_the_text_around_them_are_allowed_as_models_write_them(form: str, call: str) -> None:
    assert outcome(form, call, ends=True) is Outcome.ENDED
    assert outcome(form, TEXTS.get(form, "I will look {it} up.\n") + call, ends=True) is Outcome.ENDED
    if form != "openai":  # whose calls end the output
        assert outcome(form, f"First {call}\nthen {call} and done", ends=True) is Outcome.ENDED
    assert outcome(form, call[:-1], ends=True) is Outcome.REFUSED


@pytest.mark.parametrize("form", ("hermes", "qwen3_coder", "mistral", "openai"))
def test_an_output_without_calls_is_free(form: str) -> None:
    text = "No <tool is {needed}: [1]."
    text = f"<|channel|>final<|message|>{text}" if form == "openai" else text
    assert outcome(form, text, ends=True) is Outcome.ENDED
    assert len(matcher(form).forced_tokens()) == 0


@pytest.mark.parametrize(
    ("form", "text"),
    (
        ("hermes", "<tool_call>\nhello"),
        ("hermes", '<tool_call>\n{"name": "other"'),
        ("hermes", f'<tool_call>\n{START}{{"city": "Oslo"'),
        ("hermes", f'<tool_call>\n{START}{{"town"'),
        ("hermes", f'text <tool_call>\n{START}{{"city": "Bern", "days": 12'),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo"),
        ("qwen3_coder", f"{TAGS}<parameter=days>\nthree"),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"'),
        ("mistral", "[TOOL_CALLS]other{"),
        ("openai", f'{HEAD}{{"city": "Oslo"'),
        ("openai", "<|channel|>commentary to=functions.other"),
        ("openai", "hello"),
    ),
)
def test_what_a_call_may_not_be_is_refused(form: str, text: str) -> None:
    assert outcome(form, text) is Outcome.REFUSED


@pytest.mark.parametrize(
    ("form", "call"),
    (
        ("hermes", '<tool_call>\n{"name": "note", "arguments": {"any": [1]}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=note>\n<parameter=any>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("mistral", '[TOOL_CALLS]note[ARGS]{"any": [1]}'),
        ("openai", '<|channel|>commentary to=functions.note<|message|>{"any": [1]}'),
    ),
)
def test_tools_beside_a_strict_one_take_any_object(form: str, call: str) -> None:
    assert outcome(form, call, ends=True) is Outcome.ENDED


def drawn_calls(form: str, tools: list[dict[str, Any]], marker: str, seed: int) -> Iterator[tuple[str, str]]:
    """Calls in an output of random tokens after a marker."""
    choose, following = random.Random(seed), matcher(form, tools)
    tokens = ids(marker)
    assert following.follow(tokens) is Outcome.OPEN
    while following.follow([*tokens, EOS]) is not Outcome.ENDED:
        if len(tokens) >= 400:
            return
        following.follow(tokens)
        if forced := following.forced_tokens():
            tokens += forced
            continue
        bits = following.mask()
        allowed = [token for token in range(VOCAB_SIZE) if bits[token // 32] >> (token % 32) & 1]
        closing = [token for token in allowed if set(TOKENIZER.id_to_token(token) or "-") <= set('"}]</')]
        tokens.append(choose.choice(closing if closing and choose.random() < 0.5 else allowed))
    parser = OutputFormat(form).make_parser(tools, "")
    assert parser is not None
    events = [*parser.push(TOKENIZER.decode(tokens, skip_special_tokens=False)), *parser.finish()]
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert len(names) == 1
    yield names[0], arguments


@pytest.mark.parametrize(
    ("form", "marker"),
    (
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]get_weather"),
        ("openai", "<|channel|>commentary to="),
    ),
)
def test_arguments_of_drawn_calls_match_as_they_are_parsed(form: str, marker: str) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "null"}]},
            "note": {"type": "string"},
            "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
    }
    num_calls = 0
    for seed in range(4):
        for name, arguments in drawn_calls(form, [tool("get_weather", parameters)], marker, seed):
            assert name == "get_weather"
            jsonschema.validate(json.loads(arguments), parameters)
            num_calls += 1
    assert num_calls


def test_forms_without_a_marker_and_tools_that_are_not_strict_have_none() -> None:
    assert grammar("llama3_json", TOOLS) is grammar("pythonic", TOOLS) is None
    assert grammar("hermes", [tool("get_weather", WEATHER, strict=False)]) is None


@pytest.mark.parametrize(
    ("form", "parameters", "problem"),
    (
        ("hermes", "none", "must be an object"),
        ("qwen3_coder", {"anyOf": [WEATHER]}, "properties"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "a/pattern"),
    ),
)
def test_schemas_that_cannot_be_kept_to_are_named(form: str, parameters: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        grammar(form, [tool("first", WEATHER), tool("second", parameters)])
    assert caught.value.field == "tools[1].function.parameters"
