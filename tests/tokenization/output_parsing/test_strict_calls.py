"""Grammars of outputs with calls of strict tools: text stays free, and a call that has begun matches its schema."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from outrider.errors import InvalidRequestError
from outrider.structured_output import GrammarCompiler, Matcher, Outcome
from outrider.tokenization import TextTokenizer
from outrider.tokenization.output_parsing import AnswerGrammar, CallArguments, CallStart, OutputFormat
from outrider.types import Grammar, GrammarKind
from tests.structured_output.vocabularies import EOS, FILE, VOCAB_SIZE

SPECIAL = (
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>"),
)


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
    return OutputFormat(form).output_grammar(tools, special_token_id)


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
LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
HEAD = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
TAGS = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
DEEP_CALLS, DEEP_END = "<｜tool▁calls▁begin｜>", "\n```<｜tool▁call▁end｜>"
DEEP = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
CALLS = [
    ("hermes", f"<tool_call>\n{START}{ARGUMENTS}}}\n</tool_call>"),
    ("qwen3_coder", f"{TAGS}<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", f"{TAGS}</function>\n</tool_call>"),
    ("mistral", f"[TOOL_CALLS][{START}{ARGUMENTS}}}]"),
    ("mistral", f"[TOOL_CALLS] [{START}{ARGUMENTS}}}, {START}{ARGUMENTS}}}]"),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),
    ("deepseek_v3", f"{DEEP_CALLS}{DEEP}{ARGUMENTS}{DEEP_END}<｜tool▁calls▁end｜>"),
    ("deepseek_v3", f"{DEEP_CALLS}{DEEP}{ARGUMENTS}{DEEP_END}\n{DEEP}{ARGUMENTS}{DEEP_END}<｜tool▁calls▁end｜>"),
    ("llama3_json", LLAMA),
    ("llama3_json", f" {LLAMA}"),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}"),
    ("pythonic", '[get_weather(city="Bern", days=3)]'),
    ("pythonic", '<|python_start|>[get_weather(city="Rome"), note(any=[1], b={"c": null})]<|python_end|>'),
    ("openai", f"{HEAD}{ARGUMENTS}"),
    ("openai", f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}"),
]
ANALYSIS = "<|channel|>analysis<|message|>Let me see: {}.<|end|><|start|>assistant"
TEXTS = {"openai": ANALYSIS}


@pytest.mark.parametrize(("form", "call"), CALLS)
def test_calls_and_the_text_around_them_are_allowed_as_models_write_them(form: str, call: str) -> None:
    assert outcome(form, call, ends=True) is Outcome.ENDED
    if form in WHOLE:
        return
    assert outcome(form, TEXTS.get(form, "I will look {it} up.\n") + call, ends=True) is Outcome.ENDED
    if form != "openai":  # whose calls end the output
        assert outcome(form, f"First {call}\nthen {call} and done", ends=True) is Outcome.ENDED


WHOLE = ("llama3_json", "pythonic")
"""Forms whose calls are the whole output."""


@pytest.mark.parametrize(("form", "call"), CALLS)
def test_a_call_that_is_not_whole_does_not_end(form: str, call: str) -> None:
    cut = call.removesuffix("<|python_end|>")[:-1]
    assert outcome(form, cut, ends=True) is Outcome.REFUSED
    assert outcome(form, cut) is Outcome.OPEN


@pytest.mark.parametrize("form", ("hermes", "qwen3_coder", "mistral", "openai", *WHOLE))
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
        ("llama3_json", '{"name": "other"'),
        ("llama3_json", f' {LLAMA[:-2]}, "more"'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"'),
        ("pythonic", "[other("),
        ("pythonic", '[get_weather(days=3, city="Bern"'),
        ("pythonic", "[get_weather()"),
        ("pythonic", '[get_weather(city="Oslo"'),
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
        ("llama3_json", '{"name": "note", "parameters": {"any": [1]}}'),
        ("pythonic", '[note(any=[1], b="c")]'),
        ("pythonic", "[note()]"),
    ),
)
def test_tools_beside_a_strict_one_take_any_object(form: str, call: str) -> None:
    assert outcome(form, call, ends=True) is Outcome.ENDED


@pytest.mark.parametrize("form", sorted({form for form, _ in CALLS}))
@pytest.mark.parametrize(
    ("part", "words"),
    (
        ({"type": "array", "uniqueItems": True}, "uniqueItems is"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is"),
    ),
)
def test_a_keyword_that_is_not_supported_is_named_by_its_path(form: str, part: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        matcher(form, [TOOLS[0], tool("second", {"type": "object", "properties": {"a": part}})])
    assert caught.value.problem.startswith(f"tools[1].function.parameters/properties/a/{words} not supported")


@pytest.mark.parametrize(("form", "call"), [(form, call) for form, call in CALLS if form != "llama3_json"])
def test_an_output_is_calls_or_an_answer_that_matches_a_schema(form: str, call: str) -> None:
    answer = AnswerGrammar(
        {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}, "response_format"
    )
    text = OutputFormat(form).output_grammar([tool("get_weather", WEATHER, strict=False)], special_token_id, answer)
    following = COMPILER.compile(Grammar(GrammarKind.LARK, text or ""), (EOS,))
    head = "<|channel|>final<|message|>" if form == "openai" else ""
    for output, outcome in (
        (f'{head}{{"sum": 3}}', Outcome.ENDED),
        (call.replace(', note(any=[1], b={"c": null})', ""), Outcome.ENDED),
        (f"{head}The sum is 3.", Outcome.REFUSED),
        (f'{head}{{"sum": "3"}}', Outcome.REFUSED),
    ):
        assert following.follow([*ids(output), EOS]) is outcome, output


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
    starts = [place for place, event in enumerate(events) if isinstance(event, CallStart)]
    assert starts
    for start, stop in itertools.pairwise([*starts, len(events)]):
        name = events[start]
        assert isinstance(name, CallStart)
        yield name.name, "".join(event.text for event in events[start:stop] if isinstance(event, CallArguments))


@pytest.mark.parametrize(
    ("form", "marker"),
    (
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]get_weather"),
        ("deepseek_v3", DEEP_CALLS),
        ("openai", "<|channel|>commentary to="),
        ("llama3_json", '{"name'),
        ("pythonic", "[get_weather"),
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


@pytest.mark.parametrize(
    ("required", "allowed", "refused"),
    (
        ((), ("", "a=1", "b=2", "c=3", "a=1, c=3", "a=1, b=2, c=3"), ("b=2, a=1", "a=1,", ", b=2")),
        (("b",), ("b=2", "a=1, b=2", "b=2, c=3"), ("", "a=1", "c=3", "a=1, c=3")),
        (("a", "c"), ("a=1, c=3", "a=1, b=2, c=3"), ("a=1, b=2", "b=2, c=3")),
    ),
)
def test_properties_that_are_not_required_may_be_left_out(
    required: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}, "required": required}
    following = matcher("pythonic", [tool("f", parameters)])
    ended = [following.follow([*ids(f"[f({text})]"), EOS]) is Outcome.ENDED for text in (*allowed, *refused)]
    assert ended == [True] * len(allowed) + [False] * len(refused)


def test_tools_that_are_not_strict_and_unknown_forms_have_none() -> None:
    assert OutputFormat("llama3_json").output_grammar(TOOLS, special_token_id, AnswerGrammar({}, "any")) is None
    assert grammar("none", TOOLS) is None
    assert grammar("hermes", [tool("get_weather", WEATHER, strict=False)]) is None


MALFORMED: tuple[tuple[Any, str], ...] = (
    ("none", "must be an object with properties"),
    ({"type": "object", "properties": {"a": 5}}, "/properties/a must be an object"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "/properties/a must be an object"),
    ({"type": "object", "properties": {"a": {}}, "required": 5}, "/required must list names of properties"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "/required must list names of properties"),
    ({**WEATHER, "anyOf": [{"required": ["city"]}, {"required": ["days"]}]}, "/anyOf is not supported"),
    ({**WEATHER, "minProperties": 2}, "/minProperties is not supported"),
)


NAMED = {
    "hermes": '<tool_call>\n{"name": "get-weather", "arguments": {"%s": 5}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get-weather>\n<parameter=%s>\n5\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "get-weather", "arguments": {"%s": 5}}]',
    "llama3_json": '{"name": "get-weather", "parameters": {"%s": 5}}',
    "pythonic": "[get-weather(%s=5)]",
}


@pytest.mark.parametrize("form", NAMED)
@pytest.mark.parametrize("name", ("from", "max-results", "größe", "2fa", "$id"))
def test_names_that_are_none_in_python_are_read(form: str, name: str) -> None:
    parameters = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    tools, text = [tool("get-weather", parameters)], NAMED[form] % name
    assert matcher(form, tools).follow([*ids(text), EOS]) is Outcome.ENDED
    parser = OutputFormat(form).make_parser(tools, "")
    assert parser is not None
    events = [*itertools.chain.from_iterable(map(parser.push, text)), *parser.finish()]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["get-weather"]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert json.loads(arguments) == {name: 5}


@pytest.mark.parametrize("form", ("hermes", "mistral", "llama3_json", "pythonic"))
def test_what_cannot_be_compiled_is_named_by_its_path(form: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].function.parameters/properties/a: regex parse error"):
        matcher(form, [tool("f", parameters)])


@pytest.mark.parametrize("form", ("qwen3_coder", "pythonic"))
@pytest.mark.parametrize("schema", (True, {"type": 5}, {"anyOf": 5}))
def test_schemas_of_properties_without_plain_types(form: str, schema: Any) -> None:
    """Refused with the tool's field, or as free as JSON Schema has them."""
    tools = [tool("f", {"type": "object", "properties": {"a": schema}})]
    try:
        COMPILER.compile(Grammar(GrammarKind.LARK, str(grammar(form, tools)), "tools"), (EOS,))
    except InvalidRequestError as error:
        assert schema is not True, error


@pytest.mark.parametrize(
    ("form", "parameters", "problem"),
    (
        ("hermes", "none", "must be an object"),
        ("qwen3_coder", {"anyOf": [WEATHER]}, "properties"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "a/pattern"),
        *((form, *case) for form in ("qwen3_coder", "pythonic") for case in MALFORMED),
        ("pythonic", {"type": "object", "properties": {"two words": {}}}, "/properties/two words has a name"),
        ("pythonic", {"type": "object", "properties": {" a": {}}}, "/properties/ a has a name"),
        ("qwen3_coder", {"type": "object", "properties": {"a>b": {}}}, "/properties/a>b has a name"),
    ),
)
def test_schemas_that_cannot_be_kept_to_are_named(form: str, parameters: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        grammar(form, [tool("first", WEATHER), tool("second", parameters)])
    assert caught.value.field == "tools[1].function.parameters"


ANSWER = AnswerGrammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "any")
CHANNELS = "<|channel|>analysis<|message|>It is 2.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("tools", ((), TOOLS), ids=("alone", "beside tools"))
@pytest.mark.parametrize(
    ("parser", "calls", "begins"),
    (
        ("qwen3", "hermes", ("", "<think>\nIs it {2}?</think>\n\n", "<think></think>")),
        ("openai", "openai", ("<|channel|>final<|message|>", CHANNELS)),
    ),
)
def test_an_answer_may_come_after_reasoning_that_the_model_begins(
    parser: str, calls: str, begins: tuple[str, ...], tools: Any
) -> None:
    text = OutputFormat(calls, parser).output_grammar(list(tools), special_token_id, ANSWER, "assistant\n")
    assert text is not None
    for begin in begins:
        for answer, outcome in (('{"a": 2}', Outcome.ENDED), ('{"a": "2"}', Outcome.REFUSED), ("", Outcome.REFUSED)):
            following = COMPILER.compile(Grammar(GrammarKind.LARK, text), (EOS,))
            assert following.follow([*ids(begin + answer), EOS]) is outcome, (begin, answer)


OF_KINDS = (
    (AnswerGrammar('{"type": "integer"}', "any"), "12", "1.2"),
    (AnswerGrammar(r"\d{2}/[a-z]\s\"?", "any", GrammarKind.REGEX), "12/a ", "12a "),
    (AnswerGrammar(" b|\\nb", "any", GrammarKind.REGEX), " b", "b"),
    (AnswerGrammar(["yes\n}", 'n"o'], "any", GrammarKind.CHOICE), "yes\n}", "no"),
    (AnswerGrammar('start: rest "}"\nrest: TEXT\nTEXT: /[a-c{]+/ // }', "any", GrammarKind.LARK), "a{b}", "x}"),
    (AnswerGrammar('root ::= "a" b\nb ::= [0-9]+', "any", GrammarKind.LARK), "a12", "a"),
)
WEATHER_CALLS = {
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    "openai": HEAD + '{"city": "Bern"}',
}


@pytest.mark.parametrize(("answer", "right", "wrong"), OF_KINDS, ids=lambda case: getattr(case, "kind", None))
@pytest.mark.parametrize("tools", ((), TOOLS[:1]), ids=("alone", "beside tools"))
@pytest.mark.parametrize(
    ("parser", "calls", "begins"),
    (
        ("qwen3", "hermes", ("", "<think>\nIs it {2}?</think>\n\n", "<think></think>")),
        ("openai", "openai", ("<|channel|>final<|message|>", CHANNELS)),
    ),
)
def test_an_answer_of_any_kind_may_come_after_reasoning(
    parser: str, calls: str, begins: tuple[str, ...], tools: Any, answer: AnswerGrammar, right: str, wrong: str
) -> None:
    text = OutputFormat(calls, parser).output_grammar(list(tools), special_token_id, answer, "assistant\n")
    for begin in begins:
        for output, is_right in ((right, True), (wrong, False), (WEATHER_CALLS[parser], bool(tools))):
            following = COMPILER.compile(Grammar(GrammarKind.LARK, text or ""), (EOS,))
            head = begin.removesuffix("<|channel|>final<|message|>") if output.startswith("<|channel|>") else begin
            found = following.follow([*ids(head + output), EOS])
            assert (found is Outcome.ENDED) == is_right, (begin, output)


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    (
        (GrammarKind.REGEX, "(", "regex"),
        (GrammarKind.REGEX, "", "must not be empty"),
        (GrammarKind.CHOICE, [], "must not be empty"),
        (GrammarKind.LARK, "stat: x", "at line 1"),
        (GrammarKind.JSON_SCHEMA, "{", "is no JSON"),
    ),
)
def test_what_is_wrong_with_an_answer_of_any_kind_is_said(kind: GrammarKind, value: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        text = OutputFormat(None, "qwen3").output_grammar([], special_token_id, AnswerGrammar(value, "any", kind), "")
        COMPILER.compile(Grammar(GrammarKind.LARK, text or ""), (EOS,))


@pytest.mark.parametrize(
    ("form", "head", "tail"),
    (
        (OutputFormat("hermes", "qwen3"), "<think></think>", '{"a": 2}'),
        (OutputFormat("hermes"), WEATHER_CALLS["qwen3"], WEATHER_CALLS["qwen3"]),
        (OutputFormat("pythonic"), "", '[get_weather(city="Bern")]'),
    ),
)
def test_blanks_around_calls_and_after_reasoning_end(form: OutputFormat, head: str, tail: str) -> None:
    text = form.output_grammar(TOOLS[:1], special_token_id, ANSWER, "assistant\n")
    for blanks, is_taken in (("\n\n", True), ("\n" * 100, False)):
        following = COMPILER.compile(Grammar(GrammarKind.LARK, text or ""), (EOS,))
        assert (following.follow([*ids(head + blanks + tail), EOS]) is Outcome.ENDED) == is_taken


def test_a_call_is_enforced_on_channels_after_analysis() -> None:
    tools = [tool("get_weather", WEATHER, strict=False), tool("now", {"type": "object", "maxProperties": 0})]
    weather, now = HEAD + '{"city": "Bern"}', HEAD.replace("get_weather", "now") + "{}"
    for name, outputs in (
        ("", {weather: True, now: True, ANALYSIS + weather: True}),
        ("now", {weather: False, now: True, ANALYSIS + now: True}),
    ):
        text = OutputFormat("openai", "openai").enforced_grammar(tools, name)
        for output, is_taken in {
            **outputs,
            HEAD + '{"city": "Nowhere"}': False,
            "<|channel|>final<|message|>No.": False,
            "<|channel|>analysis<|message|>No.": False,
        }.items():
            following = COMPILER.compile(Grammar(GrammarKind.LARK, text or ""), (EOS,))
            assert (following.follow([*ids(output), EOS]) is Outcome.ENDED) == is_taken, (name, output)
    assert OutputFormat("hermes", "qwen3").enforced_grammar(tools, "") is None


def test_reasoning_that_the_prompt_has_ended_does_not_come_again() -> None:
    form = OutputFormat(None, "qwen3")
    assert form.output_grammar([], special_token_id, ANSWER, "<think>\n\n</think>\n\n") is None
    assert form.output_grammar([], special_token_id, None, "assistant\n") is None


ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BERN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NOWHERE = BERN.replace("Bern", "Nowhere")
THOUGHT = "<think>\nIs it <b> or {2}?</think>\n\n"


@pytest.mark.parametrize("is_special", (True, False), ids=("special", "not special"))
@pytest.mark.parametrize(
    ("answer", "outputs"),
    (
        (ANSWER, {'{"a": 2}': True, THOUGHT + '{"a": 2}': True, THOUGHT + BERN: True, THOUGHT + NOWHERE: False}),
        (None, {BERN: True, f"Hi {BERN}": True, f"Hi {NOWHERE}": False, THOUGHT + BERN: True, f"{THOUGHT}Hi": True}),
    ),
    ids=("answer", "free text"),
)
def test_tags_may_be_added_tokens(is_special: bool, answer: AnswerGrammar | None, outputs: dict[str, bool]) -> None:
    """Engines match no text with an added token such as ``<think>``, which models write where they have it."""
    made = Tokenizer.from_str(FILE.read_text())
    made.add_tokens([AddedToken(tag, special=is_special, normalized=False) for tag in ADDED])
    text = TextTokenizer(made)
    found = OutputFormat("hermes", "qwen3").output_grammar(TOOLS[:1], text.added_token_id, answer, "assistant\n")
    size = VOCAB_SIZE + len(ADDED)
    compiler = GrammarCompiler({"tokenizer.json": made.to_str().encode()}, vocab_size=size, eos_token_ids=(EOS,))
    for output, is_taken in outputs.items():
        for token_ids in (made.encode(output, add_special_tokens=False).ids, ids(output)):
            following = compiler.compile(Grammar(GrammarKind.LARK, found or ""), (EOS,))
            assert (following.follow([*token_ids, EOS]) is Outcome.ENDED) == is_taken, output
    assert all(text.is_special(tag) is is_special for tag in ADDED) and not text.is_special("hi")


def test_texts_of_schemas_are_no_rules_of_the_grammar() -> None:
    described = {**WEATHER, "properties": {"city": {"type": "string", "description": "the start: of a route"}}}
    text = OutputFormat("pythonic", "qwen3").output_grammar([tool("f", described)], special_token_id, ANSWER)
    following = COMPILER.compile(Grammar(GrammarKind.LARK, text or ""), (EOS,))
    assert following.follow([*ids('<think></think>[f(city="Bern")]'), EOS]) is Outcome.ENDED
