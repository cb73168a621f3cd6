"""Grammars of the SDK's options."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from outrider.client.requests import build_request
from outrider.errors import InvalidRequestError
from outrider.transport.convert.sampling import sampling_from_proto, sampling_to_proto
from outrider.types import Grammar, GrammarKind, SamplingParams


class Person(BaseModel):
    name: str


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ({"json_schema": {"type": "object"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"json_schema": '{"a": 1}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"a": 1}')),
        ({"json_schema": Person}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(Person.model_json_schema()))),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"choice": ["ä", "b"]}, Grammar(GrammarKind.CHOICE, json.dumps(["ä", "b"]))),
        ({"grammar": "start: /a/"}, Grammar(GrammarKind.LARK, "start: /a/")),
        ({"regex": "a", "grammar_after": "</think>"}, Grammar(GrammarKind.REGEX, "a", "</think>")),
    ),
)
def test_a_grammar_travels(options: dict[str, Any], expected: Grammar) -> None:
    request, _ = build_request({"prompt": "x", **options})  # type: ignore[typeddict-item]
    assert request.sampling.grammar == expected
    assert sampling_from_proto(sampling_to_proto(SamplingParams(grammar=expected))).grammar == expected


@pytest.mark.parametrize(
    ("options", "field"),
    (
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema"),
        ({"regex": 3}, "regex"),
        ({"regex": ""}, "regex"),
        ({"choice": "ab"}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"grammar": ["a"]}, "grammar"),
        ({"grammar_after": "</think>"}, "grammar_after"),
        ({"regex": "a", "grammar_after": "x" * 300}, "grammar_after"),
        ({"json_schema": {}, "regex": "a"}, "regex"),
    ),
)
def test_what_is_no_grammar_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request({"prompt": "x", **options})  # type: ignore[typeddict-item]
    assert caught.value.field == field
