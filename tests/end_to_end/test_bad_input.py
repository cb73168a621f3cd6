"""Bad input through the SDK and three real processes: a clear error names the field, and nothing else is harmed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider import Client
from outrider.errors import ConfigError, InvalidRequestError, UnavailableError

BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt_token_ids", {"prompt_token_ids": [1, -1]}),
    ("prompt_token_ids", {"prompt_token_ids": [1, 1 << 20]}),
    ("prompt_token_ids", {"prompt_token_ids": [1] * 100_000}),
    ("temperature", {"prompt": "x", "temperature": -0.1}),
    ("temperature", {"prompt": "x", "temperature": math.nan}),
    ("temperature", {"prompt": "x", "temperature": math.inf}),
    ("top_p", {"prompt": "x", "top_p": 0.0}),
    ("top_p", {"prompt": "x", "top_p": 1.1}),
    ("top_k", {"prompt": "x", "top_k": -2}),
    ("min_p", {"prompt": "x", "min_p": 1.1}),
    ("min_p", {"prompt": "x", "min_p": -0.1}),
    ("max_tokens", {"prompt": "x", "max_tokens": 0}),
    ("max_tokens", {"prompt": "x", "max_tokens": -5}),
    ("min_tokens", {"prompt": "x", "min_tokens": -1}),
    ("min_tokens", {"prompt": "x", "min_tokens": 9, "max_tokens": 8}),
    ("repetition_penalty", {"prompt": "x", "repetition_penalty": 0.0}),
    ("frequency_penalty", {"prompt": "x", "frequency_penalty": 3.0}),
    ("presence_penalty", {"prompt": "x", "presence_penalty": math.nan}),
    ("logit_bias", {"prompt": "x", "logit_bias": {1 << 20: 1.0}}),
    ("logit_bias", {"prompt": "x", "logit_bias": {1: math.inf}}),
    ("allowed_token_ids", {"prompt": "x", "allowed_token_ids": [1 << 20]}),
    ("allowed_token_ids", {"prompt": "x", "allowed_token_ids": []}),
    ("stop_token_ids", {"prompt": "x", "stop_token_ids": [-3]}),
    ("stop", {"prompt": "x", "stop": [""]}),
    ("logprobs", {"prompt": "x", "logprobs": -1}),
    ("seed", {"prompt": "x", "seed": -1}),
    ("num_speculative_tokens", {"prompt": "x", "num_speculative_tokens": -1}),
    ("acceptance_method", {"prompt": "x", "acceptance_method": "hope"}),
]


@pytest.mark.parametrize(("field", "arguments"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_named_and_the_next_request_is_served(
    client: Client, field: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(**arguments)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert len(client.generate(prompt_token_ids=[1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("arguments", [{"use_beam_search": True}, {"best_of": 2}], ids=str)
def test_what_is_not_offered_is_refused_by_name(client: Client, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(prompt="x", **arguments)
    assert next(iter(arguments)) in str(caught.value)


def test_neither_and_both_prompts_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        client.generate(max_tokens=2)
    with pytest.raises(InvalidRequestError, match="prompt"):
        client.generate(prompt="x", prompt_token_ids=[1], max_tokens=2)


def test_a_huge_prompt_is_a_clear_error(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        client.generate(prompt="x" * 3_000_000)


def test_a_wrong_address_is_named() -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        nobody.generate(prompt="x", timeout=5)


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:x", "unix:"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Client(address)
