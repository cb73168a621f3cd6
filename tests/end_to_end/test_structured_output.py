"""Output of the embedded pair under grammars: it matches, and is the same with and without drafts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from outrider.client.requests import build_request
from outrider.errors import InvalidRequestError
from outrider.generation import Resumption
from outrider.readings import HistogramReading
from tests.support.stack import Stack, run_stack

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["int", "text"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}
PROMPT = "def size():\n    return "
ALL = ("rejection", "coupled", "typical")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with run_stack(PAIR / "target", PAIR / "draft", wire=True, draft_timeout_ms=60_000) as stack:
        yield stack


pytestmark = pytest.mark.asyncio(loop_scope="module")


def check(text: str, finish_reason: str) -> None:
    if finish_reason == "stop":
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(("method", "temperature"), (("rejection", 0.0), ("coupled", 1.2)))
async def test_output_is_the_same_for_all_draft_lengths(stack: Stack, method: str, temperature: float) -> None:
    options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 100, "seed": 3, "temperature": temperature}
    results = [
        await stack.generate(prompt=PROMPT, acceptance_method=method, num_speculative_tokens=count, **options)
        for count in (0, 1, 4, 8)
    ]
    check(results[0].text, results[0].finish_reason)
    assert len({result.token_ids for result in results}) == 1
    assert results[-1].speculation.num_accepted_tokens > 0
    assert all(result.timing.grammar > 0 and result.timing.mask > 0 for result in results)


@pytest.mark.parametrize(("method", "temperature"), (("rejection", 0.0), ("coupled", 1.2), ("rejection", 0.9)))
async def test_forced_text_takes_few_steps_and_leaves_the_output_as_it_is(
    monkeypatch: pytest.MonkeyPatch, stack: Stack, method: str, temperature: float
) -> None:
    """Text that the grammar forces is proposed without drafts too."""
    names = ("is_available_now", "requires_registration", "supports_encryption")
    schema = {**SCHEMA, "properties": {name: {"enum": ["yes", "no"]} for name in names}, "required": list(names)}
    options: dict[str, Any] = {"json_schema": schema, "max_tokens": 100, "seed": 5, "temperature": temperature}
    options |= {"acceptance_method": method, "num_speculative_tokens": 0}
    forced = await stack.generate(prompt=PROMPT, **options)
    monkeypatch.setattr("outrider_coordinator.session.forced_tokens.MAX_FORCED_TOKENS", 0)
    plain = await stack.generate(prompt=PROMPT, **options)
    jsonschema.validate(json.loads(forced.text), schema)
    assert forced.speculation.num_draft_tokens == plain.speculation.num_draft_tokens == 0
    assert plain.speculation.num_steps == len(plain.token_ids)
    assert forced.speculation.num_steps < 0.7 * len(forced.token_ids)
    if method == "coupled" or temperature == 0:
        assert forced.token_ids == plain.token_ids


@pytest.mark.parametrize("method", ALL)
async def test_drawn_output_matches(stack: Stack, method: str) -> None:
    for seed, temperature in enumerate((0.8, 1.0, 1.2)):
        result = await stack.generate(
            prompt=PROMPT,
            json_schema=SCHEMA,
            temperature=temperature,
            seed=seed,
            acceptance_method=method,
            max_tokens=150,
            frequency_penalty=0.2,
        )
        check(result.text, result.finish_reason)


@pytest.mark.parametrize(
    ("grammar", "texts"),
    (
        ({"regex": "[ab]c"}, {"ac", "bc"}),
        ({"choice": ["left", "right"]}, {"left", "right"}),
        ({"grammar": 'root ::= "x" [1-2] "y"'}, {"x1y", "x2y"}),
    ),
)
async def test_other_grammars(stack: Stack, grammar: dict[str, Any], texts: set[str]) -> None:
    result = await stack.generate(prompt="hello", temperature=1.0, max_tokens=20, **grammar)
    assert result.text in texts and result.finish_reason == "stop"


async def test_logprobs_of_the_masked_law(stack: Stack) -> None:
    result = await stack.generate(prompt="hello", choice=["left", "right"], logprobs=2, temperature=1.0)
    assert result.text in ("left", "right") and result.logprobs is not None
    assert [each.token_id for each in result.logprobs] == list(result.token_ids)


async def test_a_grammar_that_leaves_no_token_fails_its_own_session(stack: Stack) -> None:
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        await stack.generate(prompt="hello", regex="ab", min_tokens=20, max_tokens=30)
    assert (await stack.generate(prompt="hello", regex="ab")).text == "ab"


@pytest.mark.parametrize(
    ("options", "field"),
    (
        ({"json_schema": {"properties": {"a": {"uniqueItems": True}}}}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"choice": []}, "choice"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a" * 300_000}, "regex"),
    ),
)
async def test_what_cannot_be_followed_is_refused(stack: Stack, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await stack.generate(prompt="hello", **options)
    assert caught.value.field == field


async def test_a_grammar_is_followed_on_from_tokens_that_were_given_out(stack: Stack) -> None:
    """State of the matcher follows from the tokens, as after a coordinator's end."""
    options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 100, "seed": 3, "temperature": 0}
    whole = await stack.generate(prompt=PROMPT, **options)
    request, _ = build_request({"prompt": PROMPT, **options})  # type: ignore[typeddict-item]
    for count in (0, 3, len(whole.token_ids) // 2):
        resumed = replace(request, resume=Resumption(whole.token_ids[:count]), resumable=True)
        last = [delta async for delta in stack.coordinator.generate_stream(resumed)][-1]
        assert last.result is not None and last.result.token_ids == whole.token_ids
    with pytest.raises(InvalidRequestError, match="refused by the request's grammar"):
        async for _ in stack.coordinator.generate_stream(replace(request, resume=Resumption((5, 6)), resumable=True)):
            pass


async def test_grammars_are_seen_in_metrics(stack: Stack) -> None:
    await stack.generate(prompt=PROMPT, json_schema=SCHEMA, max_tokens=60, temperature=0)
    readings = {reading.name: reading.value for reading in (*stack.coordinator.readings(), *stack.target.readings())}
    for name in ("outrider_grammar_compile_seconds", "outrider_grammar_mask_seconds"):
        found = readings[name]
        assert isinstance(found, HistogramReading) and found.count > 0
    assert readings["outrider_forced_tokens_total"] >= readings["outrider_accepted_forced_tokens_total"] > 0  # type: ignore[operator]
