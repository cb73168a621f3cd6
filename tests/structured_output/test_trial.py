"""Trials of grammars that may take long, in processes that the kernel ends."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from llguidance import LLMatcher

from outrider.errors import InvalidRequestError, UnavailableError
from outrider.structured_output import GrammarCompiler, trial
from outrider.types import Grammar, GrammarKind
from tests.structured_output.vocabularies import EOS, FILE, VOCAB_SIZE

MINUTES = {"allOf": [{"type": "string", "pattern": f"a{{{count}}}.*b"} for count in range(1, 60)]}
SHORT = {"type": "number", "multipleOf": 0.01}
LONG = {"properties": {f"p{number}": {"multipleOf": 997 + number} for number in range(9)}}


def grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def compiler() -> GrammarCompiler:
    files = {"tokenizer.json": FILE.read_bytes()}
    return GrammarCompiler(files, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), tries_first=True)


@pytest.mark.parametrize(("schema", "is_within"), ((MINUTES, False), (LONG, True)))
def test_a_grammar_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, schema: Any, is_within: bool) -> None:
    monkeypatch.setattr(trial, "PATIENCE_S", 600.0)
    translated = LLMatcher.grammar_from_json_schema(schema)
    assert trial.is_compiled_within(grammar(schema), translated, 0.3 if is_within else 0.05) is is_within


def test_only_what_may_take_long_is_tried_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def note(*_: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
        tried.append(options["input"])
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", note)
    shared = compiler()
    for schema in ({"type": "string", "pattern": "a&b"}, SHORT, {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}):
        shared.compile(grammar(schema), (EOS,))
    assert not tried
    for _ in range(2):
        shared.compile(grammar(LONG), (EOS,))
    assert len(tried) == 1


def test_a_keyword_cannot_be_hidden_by_escapes() -> None:
    assert trial.may_take_long(Grammar(GrammarKind.JSON_SCHEMA, r'{"m\u0075ltipleOf": 49999}'))
    assert not trial.may_take_long(grammar({"const": "ä☃", "multipleOf": 100}))
    chain = {f"a{place}": {"$ref": f"#/$defs/a{place + 1}", "pattern": "a"} for place in range(20)}
    assert trial.may_take_long(grammar({"$ref": "#/$defs/a0", "$defs": chain}))


def test_what_the_trial_refuses_is_refused_and_a_machine_without_room_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = compiler()

    def end(*_: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(subprocess, "run", end)
    with pytest.raises(UnavailableError, match="cannot be tried now"):
        shared.compile(grammar(LONG), (EOS,))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -27))
    with pytest.raises(InvalidRequestError, match=r"takes more than the 0\.5 s of a processor"):
        shared.compile(grammar(LONG), (EOS,))
