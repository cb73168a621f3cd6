"""Keywords that the engine does not support and that are said otherwise: the output is judged as by a validator."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from outrider.errors import InvalidRequestError
from outrider.structured_output import Outcome
from outrider.structured_output.finite_values import without_refused_values
from outrider.structured_output.patterns import engine_pattern
from tests.structured_output.vocabularies import EOS, ids, matcher

NEEDS = {
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
    "dependencies": {"a": ["b"], "b": ["a"], "c": ["b"]},
    "additionalProperties": False,
}

OPEN = {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": True}
SHUT = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}


ONLY = {"additionalProperties": False}
NAMES = {"$defs": {"Name": {"enum": ["a", "b"], "type": "string"}}, "properties": {"b": {"type": "null"}}}
PETS = {
    kind.title(): {"type": "object", "properties": {"kind": {"const": kind}, "n": {}}, "required": ["kind", "n"]}
    for kind in ("cat", "dog")
}
CAT, DOG = {"kind": "cat", "n": 1}, {"kind": "dog", "n": 2}


@pytest.mark.parametrize(
    ("schema", "values"),
    (
        ({"enum": [1, 2, "a", None], "not": {"enum": [2, None]}}, (1, 2, "a", None)),
        ({"allOf": [{"enum": ["foo", 3, 4.5]}, {"not": {"type": "integer"}}]}, ("foo", 3, 4.5)),
        ({"allOf": [{"enum": [2, 3, 12]}, {"not": {"multipleOf": 2}}]}, (2, 3, 12)),
        ({"allOf": [{"const": {"b": 1, "a": 2}}, {"not": {"required": ["c"]}}]}, ({"b": 1, "a": 2}, {"c": 1})),
        ({"enum": [{"b": 1, "a": 2}, []], "not": {"type": "object", "required": ["a"]}}, ([], {"b": 1, "a": 2})),
        ({"type": "object", **NEEDS}, ({"a": 1, "b": 2}, {"a": 1}, {"b": 2}, {})),
        ({"type": "array", "uniqueItems": False, "maxContains": 1, "unevaluatedItems": True}, ([1, 1], [], 3)),
        ({"items": {"type": "integer"}, "unevaluatedItems": False, "type": "array"}, ([1, 2], ["a"])),
        ({"type": "array", "contains": {"type": "string"}, "minContains": 0}, ([1], ["a"], {})),
        ({"type": "object", "propertyNames": {}, "dependentSchemas": {}, "if": {}, **OPEN}, ({"a": 1}, {"b": 1}, 1)),
        (
            {"type": "object", "then": False, "else": {}, "propertyNames": {"type": "string"}, **SHUT},
            ({"a": 1}, {"b": 1}),
        ),
        ({"type": "object", "unevaluatedProperties": {"type": "null"}, **SHUT}, ({"a": 1}, {"b": None})),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ({"a": 1}, {"b": None}, {})),
        ({"type": "object", "required": ["a"], "minProperties": 2}, ({"a": 1, "b": 1}, {"a": 1}, {"b": 1, "c": 1})),
        ({"type": "string", "minLength": 1.0, "maxLength": 3.0}, ("", "abc", "abcd")),
        ({"type": "array", "maxItems": 1.0}, ([], [1], [1, 1])),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, (-5, 0, 7.5)),
        ({"type": "integer", "maximum": 2**70, "exclusiveMinimum": -(10**30)}, (-5, 10**40, 7.5)),
        ({"type": "number", "minimum": -1.7e308, "exclusiveMaximum": 1.7e308}, (-5, 2.5)),
        ({"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}], "$defs": PETS}, (CAT, None, DOG, 3)),
        ({"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": PETS}, (CAT, DOG, {"kind": "dog"})),
        ({"oneOf": [{"enum": ["a", 1]}, {"const": "b"}], "type": ["string", "integer"]}, ("a", "b", 1, "c")),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/Name"}, **NAMES}, ({"a": 1}, {"b": 1}, {"c": 1}, {})),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ({"ab": 1}, {"b": 1}, {})),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, ({"a": 1}, {"b": 1}, {})),
        (
            {"allOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"minProperties": 1}]},
            ({"a": 1}, {}, 1),
        ),
        ({"type": "string", "pattern": '^[^"]*$'}, ('a"', "a\\", "a\n", "a")),
        ({"type": "string", "pattern": r'^[^\\/:*?"<>|]+$'}, ("a\\b", 'a"b', "a.b")),
        ({"type": "object", "patternProperties": {'^[^"]*$': {"type": "null"}}, **ONLY}, ({'"': None}, {"a": None})),
        ({"$ref": "#/components/x", "components": {"x": {"type": "string", "pattern": '^[^"]*$'}}}, ('a"', "a")),
        ({"type": "number", "multipleOf": 3_600_000}, (7_200_000, 3_600_001)),
        (
            {"type": "object", "properties": {"a": {"type": "null"}, "ab": {}}},
            ({"abc": 1}, {"a": 1}, {"ab": 1, "b": 1}),
        ),
        ({"type": "object", "properties": {'a"-]': {"type": "null"}}}, ({'a"-]': 1}, {'a"-]': None}, {'a"-': 1})),
    ),
)
def test_the_output_is_judged_as_by_a_validator(schema: Any, values: tuple[Any, ...]) -> None:
    found, validator = matcher("json_schema", schema), _validator(schema)
    judged = [found.follow([*ids(json.dumps(value)), EOS]) is Outcome.ENDED for value in values]
    assert judged == [validator.is_valid(value) for value in values]
    assert any(judged)


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(
    "one",
    (
        *(r"[\x00-\x1f]", r"[\u0000-!]", r"(\x00|[\x01-\t]|\n|[\x0b-\x1f])", r"\S", r"[^\s]", r"\D", r"[^\d]", r"\W"),
        *(
            r"[\W_]",
            r"[^\w]",
            r"[\s\S]",
            r"[\w\W]",
            ".",
            r"[^\x00-\x1f]",
            "[[a]",
            "[a&&b]",
            "[a~~b]",
            "[+--]",
            "[^--/]",
        ),
        *("[]a]", "[^]a]", r"\<", r"[\<]", r"\W|[^\S\n]", '(?i)[^"]', r"[^\\]", r"[^[a]"),
    ),
)
def test_characters_of_a_class_are_those_of_a_validator(one: str) -> None:
    """All that the engine takes is JSON and matches, and some character is taken; control characters can be missing."""
    found = matcher("json_schema", {"type": "string", "pattern": f"^{one}$"})
    taken = set()
    for character in (*map(chr, range(0x100)), "\u0661", "\ufeff", "\U0001f600"):
        escaped = json.dumps(character)
        for text in {f'"{character}"', escaped, f'"\\u{ord(character):04x}"' if ord(character) < 0x10000 else escaped}:
            if found.follow([*ids(text), EOS]) is Outcome.ENDED:
                assert re.fullmatch(one, json.loads(text)), text
                taken.add(character)
    assert taken or not any(re.fullmatch(one, chr(code)) for code in range(0x21, 0x7F))


@pytest.mark.parametrize("one", (r"\p{Cc}", r"[\p{C}]", r"\P{P}", r"[\P{Punctuation}]"))
def test_no_category_of_characters_takes_a_quote_as_it_is(one: str) -> None:
    found = matcher("json_schema", {"type": "string", "pattern": f"^{one}$"})
    assert found.follow([*ids(r'"\u0001"'), EOS]) is Outcome.ENDED
    assert {found.follow([*ids(text), EOS]) for text in ('"""', r'"\""', r'"\\"')} == {Outcome.REFUSED}


@pytest.mark.parametrize(
    "schema",
    (
        {"type": "string", "not": {"type": 5}},
        {"type": 5, "not": {"type": "string"}},
        {"type": "string", "not": {"type": [["string"]]}},
        {"allOf": 5, "not": {"not": {"minimum": 1}}},
        {"required": ["a"], "dependencies": {"a": [["b"]]}},
    ),
)
def test_malformed_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError):
        matcher("json_schema", schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    (
        ({"type": "string", "not": {"pattern": "a"}}, "/not"),
        ({"enum": ["a"], "not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string"}}}, "/not"),
        ({"enum": [[1, 1]], "not": {"uniqueItems": True}}, "/not"),
        ({"enum": [1e-7], "not": {"maximum": 3}}, "/not"),
        ({"enum": ["a\nb"], "not": {"maxLength": 1}}, "/not"),
        ({"enum": [dict.fromkeys("abcdef", 1)], "not": {"minProperties": 9}}, "/not/minProperties"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"type": "object", "dependencies": {f"{n}": ["b"] for n in range(6)}}, "/dependencies"),
        ({"oneOf": [{"required": [*"abcdef"]}, {"required": [*"ghijkl"]}, {"required": [*"mnopqr"]}]}, "/oneOf"),
        ({"anyOf": [{"not": {"type": "object", "required": ["a"]}}]}, "/anyOf/0/not"),
        ({"type": "array", "contains": {}, "minContains": 0, "maxContains": 2}, "/contains"),
        ({"if": {"type": "object"}, "else": False}, "/else"),
        ({"$defs": {"x": {}}, "$ref": "#/$defs/x", "unevaluatedProperties": False}, "/unevaluatedProperties"),
        ({"type": "array", "items": [{}], "unevaluatedItems": False}, "/unevaluatedItems"),
        ({"items": {"additionalProperties": {}, "minProperties": 2}}, "/items/minProperties"),
        ({"type": "object", "required": ["a"], "patternProperties": {"b": {}}, "minProperties": 3}, "/minProperties"),
        (
            {"items": {"properties": {"ä": {}}, "additionalProperties": {"if": {}, "then": {}}}},
            "additionalProperties/if",
        ),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "/propertyNames"),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "number"}}}, "/oneOf"),
        ({"oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"$ref": "#/$defs/x"}}}, "/oneOf"),
        ({"items": {"multipleOf": 1048576}}, "/items/multipleOf"),
        ({"items": {"multipleOf": 997, "allOf": [{"multipleOf": 991.0}]}}, "/items/multipleOf"),
        ({"$ref": "#/$defs/x", "multipleOf": 997, "$defs": {"x": {"multipleOf": 0.991}}}, "/multipleOf"),
        ({"items": {"type": "number", "multipleOf": 86_400_000}}, "/items/multipleOf"),
        ({"$ref": "#/components/x", "components": {"x": {"uniqueItems": True}}}, "/uniqueItems"),
    ),
)
def test_what_is_not_certain_is_refused(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{path} is not supported"):
        matcher("json_schema", schema)


@pytest.mark.parametrize("text", (r'{"\u0061": 1}', r'{"a": null, "\u0061": 1}', r'{"\u00f6": 1}', r'{"q\/r": 1}'))
def test_an_escape_makes_no_declared_name_an_undeclared_one(text: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in ("a", "ö", "q/r")}}
    assert not _validator(schema).is_valid(json.loads(text))
    assert matcher("json_schema", schema).follow([*ids(text), EOS]) is Outcome.REFUSED


@pytest.mark.parametrize("others", ({}, {"additionalProperties": False}))
@pytest.mark.parametrize(
    "condition",
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
        {"oneOf": [{"required": ["a", "b"]}, {"required": ["b", "c"]}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}], "not": {"required": ["c"]}},
        {"not": {"required": ["a", "b"]}},
        {"dependentRequired": {"a": ["b"], "b": ["a", "c"]}},
        {"dependencies": {"a": {"properties": {"b": {"minimum": 5}}}, "c": ["b"]}},
        {"dependentSchemas": {"a": {"properties": {"a": {}}, "additionalProperties": False}}},
        {"anyOf": [{"not": {"required": ["a"]}}, {"required": ["b"]}]},
    ),
)
def test_conditions_on_names_are_judged_as_by_a_validator(condition: Any, others: Any) -> None:
    schema = {"properties": {name: {"type": "integer"} for name in "abc"}, **condition, **others}
    found, validator = matcher("json_schema", schema), _validator(schema)
    names = [[name for place, name in enumerate("abc") if number >> place & 1] for number in range(8)]
    for value in (*(dict.fromkeys(some, 1) for some in names), {"a": 1, "b": 7}, 5):
        assert (found.follow([*ids(json.dumps(value)), EOS]) is Outcome.ENDED) is validator.is_valid(value), value


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    (
        ("uri-reference", ("", "/a/b?c#d", "http://a.b:80/c", "../x", "a:b"), ("a b", "%2", "a#b#c")),
        ("iri", ("http://é.x/ü", "a:b"), ("é", "a b:c")),
        ("iri-reference", ("é?x",), (" ",)),
        ("uri-template", ("http://x/{id}{?q,r*}",), ("{", "{}")),
        ("json-pointer", ("", '/a~1b/~0é"'), ("a", "/~2")),
        ("relative-json-pointer", ("0", "1#", "2/a"), ("01", "-1")),
        ("idn-email", ("a@b.co",), ("a",)),
        ("idn-hostname", ("a.b",), ("a b",)),
    ),
)
def test_formats_that_the_engine_does_not_know(name: str, accepted: tuple[str, ...], refused: tuple[str, ...]) -> None:
    found = matcher("json_schema", {"type": "string", "format": name})
    for text in (*accepted, *refused):
        written = json.dumps(text, ensure_ascii=False)
        assert (found.follow([*ids(written), EOS]) is Outcome.ENDED) is (text in accepted), text


def test_branches_with_a_discriminator_require_it() -> None:
    pets = {name: {**pet, "required": ["n"]} for name, pet in PETS.items()}
    named = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in pets], "discriminator": {"propertyName": "kind"}}
    found = matcher("json_schema", {**named, "$defs": pets})
    judged = [found.follow([*ids(json.dumps(value)), EOS]) is Outcome.ENDED for value in (CAT, DOG, {"n": 1})]
    assert judged == [True, True, False]


def test_texts_of_the_format_regex_are_regular_expressions() -> None:
    drawn = random.Random(1)
    found, number = matcher("json_schema", {"type": "string", "format": "regex"}), 0
    known = ("^[a-z]+$", "a|(b|c)*d{2,}", r"\d+\.[^\s0-9]?", "(?:ab)?")
    for text in (*known, *("".join(drawn.choices(r"ab.[]()*?\|^${2}d", k=drawn.randint(1, 6))) for _ in range(600))):
        if found.follow([*ids(json.dumps(text)), EOS]) is Outcome.ENDED:
            re.compile(text)
            number += 1
        else:
            assert text not in known
    assert number > 20


def test_what_is_nested_too_deeply_is_said() -> None:
    schema: Any = {}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match="is nested too deeply for the engine"):
        matcher("json_schema", schema)


def _validator(schema: Any) -> Any:
    """``dependencies`` are of older drafts."""
    if "dependencies" in schema:
        return jsonschema.Draft7Validator(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_given_schema_is_not_changed() -> None:
    given: Any = {"allOf": [{"enum": [1, "a"]}, {"not": {"type": "string"}}]}
    before = json.dumps(given)
    assert without_refused_values(given) == {"allOf": [{"enum": [1]}, {}]}
    assert json.dumps(given) == before


def test_brackets_that_nothing_closes_are_read_once() -> None:
    """Each would otherwise be searched to the end: minutes for these."""
    assert engine_pattern("[" * 500_000 + r"\W") == "[" * 500_000 + engine_pattern(r"\W")
    assert engine_pattern("[a]" + "[" * 500_000 + r"\]") == "[a]" + "[" * 500_000 + r"\]"


def test_copies_of_definitions_within_each_other_are_bounded() -> None:
    text: Any = {"description": "x" * 100_000}
    for _ in range(20):
        text = {"next": text}
    references = [{"$ref": f"#/x{'/next' * depth}"} for depth in range(20)]
    with pytest.raises(InvalidRequestError, match="refers to more than 1,048,576 characters"):
        matcher("json_schema", {"anyOf": references, "x": text})
