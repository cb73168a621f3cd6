"""Long prompts of token ids in JSON bodies."""

from __future__ import annotations

import json
import resource

import pytest

from outrider.cooperative import run
from outrider.errors import InvalidRequestError
from outrider.gateway.protocol import CompletionRequest, parse_body, parsing
from outrider.gateway.protocol.long_prompts import parse_json

IDS = [(7919 * i) % 32_000 for i in range(100_000)]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " : ")])
def test_ids_are_parsed_in_slices(separators: tuple[str, str]) -> None:
    body = json.dumps({"model": "m", "prompt": IDS, "max_tokens": 3, "stop": ["]"]}, separators=separators).encode()
    request = parse_body(CompletionRequest, body)
    assert (request.prompts, request.max_tokens, request.stop) == ([tuple(IDS)], 3, ["]"])
    assert sum(1 for _ in parsing(CompletionRequest, body)) >= len(body) // 40_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": IDS[:10]},
        {"prompt": "word " * 20_000},
        {"prompt": [IDS, IDS]},
        {"prompt": [str(i) for i in IDS]},
        {"user": {"prompt": IDS}, "prompt": "x"},
        {"user": '"prompt": [' + "1," * 40_000 + "1]", "prompt": "x"},
        {"user": {"prompt": IDS}},
        {"prompt": [*IDS, 1.5]},
    ],
)
def test_other_bodies_are_parsed_whole(body: object) -> None:
    assert run(parse_json(json.dumps(body).encode())) == (body, None)


def test_the_last_of_two_prompts_counts() -> None:
    long = b'"prompt": ' + json.dumps(IDS).encode()
    assert run(parse_json(b"{" + long + b', "prompt": "x"}')) == ({"prompt": "x"}, None)
    assert run(parse_json(b'{"prompt": "x", ' + long + b"}"))[0] == {"prompt": IDS}


@pytest.mark.parametrize(
    "wrong",
    [b"1,,2", b"01", b"1 2", b",1", b"-1", b"1,", b"1" + b" " * 70_000 + b",", b"1," + b" " * 70_000 + b",1"],
)
def test_what_is_no_list_of_ids_is_refused(wrong: bytes) -> None:
    body = b'{"prompt": [' + b"1," * 50_000 + wrong + b"]}"
    with pytest.raises(InvalidRequestError):
        parse_body(CompletionRequest, body)


@pytest.mark.parametrize("field", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids", "prompt"])
def test_a_million_invalid_entries_are_refused_by_one_error(field: str) -> None:
    given = {"prompt": "a", field: [{}] * 1_000_000}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequestError, match=field):
        parse_body(CompletionRequest, json.dumps(given).encode())
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 512 << 10, "an error for each entry takes gigabytes"


def test_a_million_entries_of_logit_bias_are_refused_by_their_number() -> None:
    body = json.dumps({"prompt": "a", "logit_bias": {f"x{place}": 1 for place in range(1_000_000)}}).encode()
    with pytest.raises(InvalidRequestError, match="has 1000000 entries; at most 1024"):
        parse_body(CompletionRequest, body)
