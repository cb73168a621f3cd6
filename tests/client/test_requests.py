"""Checks of requests: each bad value is refused by name, by the SDK and by the checks the coordinator shares."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from outrider.client.requests import GenerateOptions, build_request
from outrider.errors import InvalidRequestError
from outrider.generation import GenerationRequest
from outrider.requests import check_against_model, check_request
from outrider.types import AcceptanceMethod, SamplingParams

BAD: list[tuple[str, Any]] = [
    ("prompt", 5),
    ("prompt", b"bytes"),
    ("prompt", "half a pair: \ud800"),
    ("prompt", "x" * 2_000_001),
    ("prompt_token_ids", []),
    ("prompt_token_ids", "12"),
    ("prompt_token_ids", 12),
    ("prompt_token_ids", [1, -1]),
    ("prompt_token_ids", [1, 1 << 40]),
    ("prompt_token_ids", [1, 2.5]),
    ("prompt_token_ids", [1, "2"]),
    ("prompt_token_ids", [True]),
    ("prompt_token_ids", [0] * 1_000_001),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "3"),
    ("max_tokens", True),
    ("max_tokens", 1 << 31),
    ("min_tokens", -1),
    ("min_tokens", 2**31),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", math.inf),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", math.nan),
    ("presence_penalty", -2.1),
    ("logit_bias", [(1, 2.0)]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: -math.inf}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: "2"}),
    ("bad_words", [""]),
    ("bad_words", [3]),
    ("bad_words", 3),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("seed", -1),
    ("seed", 1 << 64),
    ("seed", 1.0),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [None]),
    ("stop", ["x"] * 65),
    ("stop", ["\udfff"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 3),
    ("ignore_eos", "no"),
    ("draft_ahead", "no"),
    ("priority", 0.5),
    ("priority", "high"),
    ("priority", 1 << 63),
    ("include_stop_str_in_output", 1),
    ("logprobs", -1),
    ("logprobs", 1025),
    ("prompt_logprobs", -1),
    ("num_speculative_tokens", -1),
    ("num_speculative_tokens", 129),
    ("acceptance_method", "hope"),
    ("acceptance_method", 3),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", math.nan),
    ("timeout", math.inf),
    ("timeout", "soon"),
    ("request_id", 3),
    ("request_id", "x" * 257),
    ("request_id", "a\nINFO forged"),
    ("request_id", "a\x1b[2K"),
    ("request_id", "a\u2028b"),
    ("cache_salt", 3),
    ("cache_salt", "x" * 257),
    ("n", 2),
    ("n", 0),
    ("best_of", 2),
    ("use_beam_search", True),
]


def build(**options: Any) -> GenerationRequest:
    given: GenerateOptions = options  # type: ignore[assignment]
    return build_request(given)[0]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    options = (
        {field: value} if field.startswith("prompt") and "logprobs" not in field else {"prompt": "x", field: value}
    )
    with pytest.raises(InvalidRequestError) as caught:
        build(**options)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 300


GOOD: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": np.float64(0.5)},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 1.0},
    {"min_tokens": 16},
    {"repetition_penalty": 0.01},
    {"frequency_penalty": -2, "presence_penalty": 2},
    {"logit_bias": {}},
    {"logit_bias": {0: 100, 5: -100.0}},
    {"seed": 0},
    {"seed": (1 << 64) - 1},
    {"stop": []},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"num_speculative_tokens": 0},
    {"n": 1, "best_of": 1, "use_beam_search": False},
    {"timeout": 0.001},
    {key: None for key in GenerateOptions.__annotations__ if key != "prompt"},
]


@pytest.mark.parametrize("options", GOOD, ids=lambda value: repr(value)[:40])
def test_the_borders_are_allowed(options: dict[str, Any]) -> None:
    build(prompt="x", **options)


def test_exactly_one_prompt() -> None:
    for options in ({}, {"prompt": "x", "prompt_token_ids": [1]}):
        with pytest.raises(InvalidRequestError, match="exactly one of prompt, prompt_token_ids and messages") as caught:
            build(**options)
        assert caught.value.field == "prompt"


def test_values_are_taken_in_the_shapes_users_have() -> None:
    request = build(
        prompt_token_ids=np.array([1, 2], dtype=np.int64),
        stop="end",
        stop_token_ids=range(2),
        allowed_token_ids={4},
        logit_bias={3: 1},
        bad_words=("no",),
        acceptance_method=AcceptanceMethod.TYPICAL,
    )
    assert request.prompt_token_ids == (1, 2) and all(type(value) is int for value in request.prompt_token_ids or ())
    assert request.stop == ("end",) and request.stop_token_ids == (0, 1)
    assert request.sampling.allowed_token_ids == (4,) and request.sampling.logit_bias == ((3, 1),)
    assert request.bad_words == ("no",)
    assert request.acceptance_method is AcceptanceMethod.TYPICAL


def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        build(prompt="x", max_token=3)
    with pytest.raises(TypeError, match="'zzz'"):
        build(prompt="x", zzz=3)


def test_the_options_are_the_documented_ones() -> None:
    documented = (
        "max_tokens min_tokens temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty"
        " logit_bias bad_words allowed_token_ids seed stop stop_token_ids ignore_eos include_stop_str_in_output"
        " logprobs prompt_logprobs num_speculative_tokens acceptance_method draft_ahead priority"
        " timeout request_id prompt prompt_token_ids"
        " max_retries best_of use_beam_search trace_parent trace_state resume resume_timeout cache_salt messages tools"
        " documents"
        " chat_template chat_template_kwargs add_generation_prompt continue_final_message add_special_tokens"
        " skip_special_tokens json_schema regex choice grammar grammar_after"
    )
    assert set(GenerateOptions.__annotations__) == set(documented.split())
    fields = {field.name for values in (GenerationRequest, SamplingParams) for field in dataclasses.fields(values)}
    # What is resumed and what is left to the server the SDK knows by itself; a chat is made of several options.
    assert fields - {"sampling", "resumable", "defaulted", "chat"} <= set(GenerateOptions.__annotations__)


def on_the_wire(**fields: Any) -> GenerationRequest:
    return dataclasses.replace(GenerationRequest(prompt="x"), **fields)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", GenerationRequest()),
        ("prompt", GenerationRequest(prompt="x", prompt_token_ids=(1,))),
        ("prompt_token_ids", GenerationRequest(prompt_token_ids=())),
        ("max_tokens", on_the_wire(max_tokens=0)),
        ("temperature", on_the_wire(sampling=SamplingParams(temperature=math.nan))),
        ("top_p", on_the_wire(sampling=SamplingParams(top_p=0))),
        ("min_tokens", on_the_wire(max_tokens=16, sampling=SamplingParams(min_tokens=17))),
        ("stop", on_the_wire(stop=("",))),
    ],
)
def test_a_request_from_elsewhere_is_held_to_the_same(field: str, request_: GenerationRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request_)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "request_", "prompt"),
    [
        ("prompt", GenerationRequest(prompt="x"), ()),
        ("prompt_token_ids", GenerationRequest(prompt_token_ids=(10,)), (10,)),
        ("prompt_token_ids", GenerationRequest(prompt_token_ids=(1,) * 8), (1,) * 8),
        ("prompt", GenerationRequest(prompt="x"), (1,) * 8),
        ("stop_token_ids", on_the_wire(stop_token_ids=(10,)), (1,)),
        ("logit_bias", on_the_wire(sampling=SamplingParams(logit_bias=((10, 1.0),))), (1,)),
        ("allowed_token_ids", on_the_wire(sampling=SamplingParams(allowed_token_ids=(10,))), (1,)),
    ],
)
def test_what_a_model_cannot_accept(field: str, request_: GenerationRequest, prompt: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_against_model(request_, prompt, num_token_ids=10, max_model_len=8)
    assert caught.value.field == field


def test_what_just_fits_a_model() -> None:
    request = GenerationRequest(
        prompt_token_ids=(9,) * 7,
        stop_token_ids=(9,),
        sampling=SamplingParams(logit_bias=((9, 1.0),), allowed_token_ids=(9,)),
    )
    check_against_model(request, (9,) * 7, num_token_ids=10, max_model_len=8)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, 2**31])
def test_a_wrong_id_far_back_in_a_long_prompt_is_named(wrong: Any) -> None:
    ids = [*range(30_000), wrong]
    with pytest.raises(InvalidRequestError, match="prompt_token_ids: must be") as caught:
        build_request({"prompt_token_ids": ids})
    assert caught.value.field == "prompt_token_ids"


def test_a_long_prompt_is_taken_as_it_is_whatever_it_is_made_of() -> None:
    ids = list(range(20_000))
    forms: list[Any] = [ids, tuple(ids), np.array(ids), iter(ids)]
    for given in forms:
        request, _ = build_request({"prompt_token_ids": given})
        assert request.prompt_token_ids == tuple(ids)
        assert set(map(type, request.prompt_token_ids or ())) == {int}
