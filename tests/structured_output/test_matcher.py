"""Grammars and matchers: what they accept, what may come next, and going back."""

from __future__ import annotations

import json
import random
from typing import Any
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import InvalidRequestError
from outrider.readings import HistogramReading
from outrider.structured_output import Matcher, Outcome
from outrider.structured_output import compiler as compiling
from outrider.types import Grammar, GrammarKind
from tests.structured_output.vocabularies import EOS, FILE, VOCAB_SIZE, compiler, ids, letters, matcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": ["number", "null"]}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
DATE, TIMES = ({"type": "string", "format": name} for name in ("date", "date-time"))
"""Validators leave formats unchecked."""
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (
        PERSON,
        [{"name": "Zoë", "age": 3}, {"name": "x", "age": 150, "tags": ["a", "b"]}],
        [{"name": "x"}, {"age": 1}, []],
    ),
    (PERSON, [], [{"name": "", "age": 3}, {"name": "x", "age": 151}, {"name": "x", "age": 1, "other": 2}]),
    (NODE, [{"value": None}, {"value": -1.5e3, "next": {"value": 2}}], [{"next": {"value": 2}}, {"value": "2"}]),
    ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[], "a", None]),
    (True, [1, "a", None, [{}]], []),
    (
        DATE,
        ["2024-02-29", "2000-02-29"],
        ["2024-2-29", "today", "2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"],
    ),
    (
        TIMES,
        ["2024-02-29T23:59:59Z", "1996-12-31T00:00:00.25-08:30"],
        ["2023-02-29T00:00:00Z", "2024-02-28T12:34:60Z", "2024-02-28T24:00:00Z", "2024-02-28T12:00:00"],
    ),
    ({"type": "string", "format": "colour"}, ["anything"], [3]),
    ({"not": {"type": ["object", "array"]}}, [1, "a", None], [{}, []]),
    ({"not": {"not": {"type": "integer"}}}, [1], ["a", 1.5]),
    ({"anyOf": [{"type": "integer"}, {"const": "none"}]}, [4, "none"], ["four"]),
]


def accepts(found: Matcher, text: str) -> bool:
    return found.follow([*ids(text), EOS]) is Outcome.ENDED


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
@pytest.mark.parametrize("indent", (None, 2))
def test_a_schema_accepts_what_is_valid(schema: Any, valid: list[Any], invalid: list[Any], indent: int | None) -> None:
    found = matcher("json_schema", schema)
    for value in (*valid, *invalid):
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value) or schema in (DATE, TIMES)
        assert accepts(found, json.dumps(value, indent=indent, ensure_ascii=False)) is (value in valid), value
        assert is_valid or value in invalid


@pytest.mark.parametrize(
    ("kind", "text", "valid", "invalid"),
    (
        ("regex", r"[a-c]{2}(x|yz)", ["abx", "ccyz"], ["ab", "abxy", "abxx"]),
        ("choice", ["yes", "no", 'q"'], ["yes", "no", 'q"'], ["y", "yesno", "maybe"]),
        ("lark", 'start: "a" /[0-9]+/ "b"', ["a12b"], ["ab", "a1"]),
        ("lark", 'root ::= "a" item+\nitem ::= [0-9] ";"', ["a1;2;"], ["a", "a12"]),
    ),
)
def test_other_grammars(kind: str, text: Any, valid: list[str], invalid: list[str]) -> None:
    found = matcher(kind, text)
    assert all(accepts(found, each) for each in valid)
    assert not any(accepts(found, each) for each in invalid)


@pytest.mark.parametrize(
    ("kind", "text", "field", "words"),
    (
        (
            "json_schema",
            {"properties": {"a": {"uniqueItems": True}}},
            "json_schema",
            "/properties/a/uniqueItems is not",
        ),
        ("json_schema", {"not": {"type": "integer"}}, "json_schema", "/not is not supported"),
        ("json_schema", {"items": {"type": "strin"}}, "json_schema", "/items: Invalid type: strin"),
        ("json_schema", {"items": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}, "json_schema", "/items/oneOf is"),
        ("json_schema", "{", "json_schema", "is no JSON"),
        ("json_schema", "3", "json_schema", "must be an object"),
        ("json_schema", {"$ref": "http://localhost/x"}, "json_schema", "http://localhost/x"),
        ("regex", "(", "regex", "unclosed group"),
        ("regex", "(?=a)b", "regex", "look-ahead"),
        ("lark", "start: x", "grammar", "unknown name"),
        ("lark", 'start: "a" x\nx: %lark {\nstart: /(/\n}', "grammar", "regex parse error: ( ^ error: unclosed group"),
        ("lark", "nothing", "grammar", "::="),
        ("regex", r"[^\s\S]", "regex", "matches no text"),
        ("json_schema", {"$ref": "#"}, "json_schema", "matches no text"),
        ("lark", "", "grammar", "No 'root' rule found"),
    ),
)
def test_what_is_not_supported_is_refused_by_its_place(kind: str, text: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        matcher(kind, text)
    assert caught.value.field == field and words in caught.value.problem
    assert kind == "lark" or "start:" not in caught.value.problem  # the user's grammar has none


def test_a_part_that_is_not_found_soon_is_refused_without_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try compiles a part again with all within it, so that a large schema would hold its thread for long."""
    schema: Any = {"enum": ["a"]}
    for _ in range(40):
        schema = {"properties": {"next": schema}}
    wrong = {"properties": {"a": {"pattern": "("}, "b": schema}}
    validate, tried = LLMatcher.validate_grammar, list[str]()

    def note(grammar: str) -> str:
        tried.append(grammar)
        return str(validate(grammar))

    monkeypatch.setattr(LLMatcher, "validate_grammar", note)
    for longest_s, place, most in ((60.0, "/properties/a: regex", 100), (-1.0, "regex", 0)):
        tried.clear()
        monkeypatch.setattr("outrider.structured_output.compiler.LONGEST_SEARCH_S", longest_s)
        with pytest.raises(InvalidRequestError) as caught:
            matcher("json_schema", wrong)
        assert caught.value.problem.startswith(place) and "unclosed group" in caught.value.problem
        assert (len(tried) > 0) == (most > 0) and len(tried) <= most


def allowed(found: Matcher) -> set[int]:
    bits = np.unpackbits(found.mask().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def test_the_mask_is_what_may_be_followed() -> None:
    found = matcher("json_schema", PERSON)
    text = ids('{"name": "ab", "age": 12, "tags": ["a"]}')
    for length in range(len(text) + 1):
        assert found.follow(text[:length]) is Outcome.OPEN
        may_come = allowed(found)
        for token_id in range(0, VOCAB_SIZE, 7):
            is_open = found.follow([*text[:length], token_id]) is not Outcome.REFUSED
            assert is_open is (token_id in may_come)
        assert (EOS in may_come) is (length == len(text))


def test_ends_may_come_where_the_output_matches_and_nowhere_else() -> None:
    stop = ids("b")[0]
    found = compiler().compile(Grammar(GrammarKind.REGEX, "ab?c*"), (EOS, stop))
    assert allowed(found).isdisjoint((EOS, stop))
    assert found.follow(ids("a")) is Outcome.OPEN and allowed(found) >= {EOS, stop}
    assert found.follow([*ids("a"), stop]) is Outcome.ENDED


def test_the_state_follows_from_the_tokens_alone() -> None:
    found, text = matcher("json_schema", NODE), ids('{"value": 12, "next": {"value": null}}')
    choose = random.Random(3)
    for _ in range(60):
        length = choose.randrange(len(text) + 1)
        other = [*text[:length], *choose.choices(range(-1, VOCAB_SIZE + 5), k=choose.randrange(3))]
        fresh = matcher("json_schema", NODE)
        assert found.follow(other) is fresh.follow(other)
        assert found.follow(text[:length]) is Outcome.OPEN and fresh.follow(text[:length]) is Outcome.OPEN
        assert (found.mask() == fresh.mask()).all()


def test_matchers_of_one_grammar_share_nothing() -> None:
    shared, grammar = compiler(), Grammar(GrammarKind.REGEX, "[ab]+")
    first, second = shared.compile(grammar, (EOS,)), shared.compile(grammar, (EOS,))
    assert first.follow(ids("ab")) is Outcome.OPEN and EOS in allowed(first)
    assert EOS not in allowed(second)


def test_blanks_between_parts_end() -> None:
    found = matcher("json_schema", {"type": "array"})
    assert accepts(found, "[" + " " * 32 + "]") and not accepts(found, "[" + " " * 40 + "]")


def test_a_schema_past_the_engines_bounds_is_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequestError, match="deep"):
        matcher("json_schema", deep)


@pytest.mark.parametrize(
    ("kind", "text"),
    (
        ("json_schema", {"anyOf": [{"type": "object", "properties": {f"k{i}": True}} for i in range(1_200)]}),
        ("lark", "start: " + " | ".join(f'"a{i}"' for i in range(3_000))),
    ),
)
def test_a_grammar_that_could_not_be_followed_is_refused_before_it_is(kind: str, text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is too large to be followed: Parser Error: Current row has"):
        matcher(kind, text)


def test_a_grammar_that_takes_long_to_compile_is_refused_and_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 49_999}))
    own, asked = compiler(), list[Any]()
    translate = LLMatcher.grammar_from_json_schema

    def note(schema: Any, **options: Any) -> str:
        asked.append(schema)
        return str(translate(schema, **options))

    monkeypatch.setattr(LLMatcher, "grammar_from_json_schema", note)
    monkeypatch.setattr(compiling, "LONGEST_COMPILE_S", 0.02)
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match=r"^json_schema: takes \d+\.\d s to compile, over the 0.02 s"):
            own.compile(grammar, [EOS])
    assert len(asked) == 1


def test_many_choices_are_one_text() -> None:
    words = [f"{i:05}" for i in range(5_000)]
    found = matcher("choice", words)
    assert accepts(found, words[0]) and accepts(found, words[-1]) and not accepts(found, "05000")


def small_engine() -> LLMatcher:
    """Engine with a lexer that a few outputs fill."""
    tokenizer = LLTokenizer(FILE.read_text(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    grammar = LLMatcher.grammar_from_regex("(a|b)*a(a|b){12}")
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=150))


def follow_many(found: Matcher) -> None:
    choose = random.Random(0)
    for _ in range(10):
        text = [ids(letter)[0] for letter in choose.choices("ab", k=30)]
        assert found.follow(text) is Outcome.OPEN
        assert {ids("a")[0], ids("b")[0]} <= allowed(found)


def test_what_other_outputs_left_in_the_engine_ends_none() -> None:
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "end_token_ids": (EOS,)}
    follow_many(Matcher(small_engine(), renew=lambda engine: small_engine(), **options))
    with pytest.raises(InvalidRequestError, match="regex: cannot be followed further: lexer error: too many states"):
        follow_many(Matcher(small_engine(), field="regex", **options))


def test_a_lexer_that_another_output_has_filled_refuses_no_token() -> None:
    """Copies of an engine of which one has failed refuse every token, and name no error."""
    engine, other = small_engine(), small_engine()
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "end_token_ids": (EOS,), "renew": lambda _: other}
    first, second, third = (Matcher(engine, **options) for _ in range(3))
    text = ids("ab")
    assert second.follow(text) is Outcome.OPEN and third.follow([*ids("a"), *text * 6]) is Outcome.OPEN
    with pytest.raises(InvalidRequestError, match="too many states"):
        follow_many(Matcher(engine, vocab_size=VOCAB_SIZE, end_token_ids=(EOS,)))
    for found in (first, second):
        assert found.follow([*text, *text]) is Outcome.OPEN
        assert found.follow([*text, *ids("c")]) is Outcome.REFUSED
    assert third.follow([*ids("a"), *text * 6, EOS]) is Outcome.ENDED


def test_full_lexers_one_after_the_other_are_an_error_and_no_refusal() -> None:
    """Each renewed engine is one that others have filled."""
    engine, *others = (small_engine() for _ in range(4))
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "end_token_ids": (EOS,)}
    left = [*others]
    found = Matcher(engine, renew=lambda _: left.pop(), **options)
    for full in (engine, *others):
        with pytest.raises(InvalidRequestError, match="too many states"):
            follow_many(Matcher(full, **options))
    with pytest.raises(InvalidRequestError, match="cannot be followed further: lexer error: too many states"):
        found.follow(ids("ab"))


def test_a_full_lexer_gives_way_to_one_compiled_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its grammar are as full: their outputs have filled them at the same pace."""
    shared, grammar, num_compiled = compiler(), Grammar(GrammarKind.REGEX, "(a|b)*a(a|b){12}"), 0

    def compile_small(*_: object, **__: object) -> LLMatcher:
        nonlocal num_compiled
        num_compiled += 1
        return small_engine()

    monkeypatch.setattr(compiling, "LLMatcher", Mock(side_effect=compile_small, wraps=LLMatcher))
    shared.num_lexers = 2
    held = [shared.compile(grammar, (EOS,)) for _ in range(16)]
    first, second = {id(each.grammar): each for each in held}.values()
    choose = random.Random(0)
    texts = [[ids(letter)[0] for letter in choose.choices("ab", k=30)] for _ in range(10)]
    for text in texts:  # both lexers are filled, and each is renewed when it is asked
        for found in (first, second):
            assert found.follow(text) is Outcome.OPEN and {ids("a")[0], ids("b")[0]} <= allowed(found)
    before, lost = num_compiled, {id(each.grammar) for each in held} - {id(first.grammar), id(second.grammar)}
    assert before > 2 and len(lost) == 2
    assert shared.compile(grammar, (EOS,)).grammar in (first.grammar, second.grammar) and num_compiled == before


def test_forced_tokens() -> None:
    found = matcher("choice", ["only this"])
    assert found.forced_tokens() == tuple(ids("only this"))


def test_a_grammar_may_hold_after_free_text() -> None:
    found = compiler().compile(Grammar(GrammarKind.REGEX, "[0-9]+", "</think>"), (EOS,))
    free, text = ids("I think </think>"), ids("12")
    for length in range(len(free)):
        assert found.follow(free[:length]) is Outcome.OPEN
        assert EOS not in allowed(found) and len(allowed(found)) > VOCAB_SIZE - 5
    assert found.follow([*free[:2], EOS]) is Outcome.REFUSED
    assert found.follow([*free, *ids("x")]) is Outcome.REFUSED
    assert found.follow([*free, *text]) is Outcome.OPEN and EOS in allowed(found)
    assert found.follow([*free, *text, EOS]) is Outcome.ENDED
    # Back into the free text, and on by another way.
    assert found.follow([*free[:3]]) is Outcome.OPEN and EOS not in allowed(found)
    assert found.follow([*ids("No.</think>"), *text, EOS]) is Outcome.ENDED


def test_compiling_masks_and_failures_are_counted() -> None:
    shared = compiler()
    for _ in range(2):
        shared.compile(Grammar(GrammarKind.REGEX, "[ab]+"), (EOS,)).mask()
    with pytest.raises(InvalidRequestError):
        shared.compile(Grammar(GrammarKind.REGEX, "("), (EOS,))
    compiled, failures = shared.statistics.compile_readings()
    (masks,) = shared.statistics.mask_readings()
    assert isinstance(compiled.value, HistogramReading) and isinstance(masks.value, HistogramReading)
    assert (compiled.value.count, failures.value, masks.value.count) == (1, 1, 2)


def test_masks_do_not_depend_on_tokens_that_were_taken_back() -> None:
    """Masks after a rollback, as after rejected draft tokens, are those of the tokens before."""
    schema = {
        "type": "object",
        "properties": {"discount": {"type": "number"}, "items": {"type": "array"}, "tax": {"type": "number"}},
        "required": ["items"],
    }
    following = matcher("json_schema", schema)
    for taken_back in ('{"discount": ', '{"discount": 12, '):
        tokens = ids(taken_back)
        for length in range(1, len(tokens) + 1):
            assert following.follow(tokens[:length]) is Outcome.OPEN
            following.mask()
        kept = ids('{"items": ')
        for length in range(3, len(kept) + 1):  # no mask is asked for where the texts part
            assert following.follow(kept[:length]) is Outcome.OPEN
            fresh = matcher("json_schema", schema)
            fresh.follow(kept[:length])
            assert np.array_equal(following.mask(), fresh.mask())


def test_the_grammars_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.structured_output.compiler.MAX_CACHED", 2)
    own = letters("abc")
    for text in ("a", "b", "a", "c", "a", "b"):
        own.compile(Grammar(GrammarKind.REGEX, text), (3,))
    assert own.statistics.compile_seconds.read().count == 4  # "b" anew, since "c" took its place
