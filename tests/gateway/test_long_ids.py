"""Long lists of token ids in JSON bodies, and bodies that are too much to parse."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest

from outrider.cooperative import run
from outrider.errors import InvalidRequestError
from outrider.gateway.protocol import CompletionRequest, DetokenizeRequest, parse_body, parsing
from outrider.gateway.protocol.long_ids import parse_body_json

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
        {"prompt": [IDS, []]},
        {"prompt": [IDS, "x"]},
        {"prompt": [[IDS]]},
        {"prompt": [str(i) for i in IDS]},
        {"user": {"prompt": IDS}, "prompt": "x"},
        {"user": '"prompt": [' + "1," * 40_000 + "1]", "prompt": "x"},
        {"user": {"prompt": IDS}},
        {"prompt": [*IDS, 1.5]},
    ],
)
def test_other_bodies_are_parsed_whole(body: object) -> None:
    assert run(parse_body_json(json.dumps(body).encode())) == (body, {})


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " : ")])
def test_lists_of_several_fields_and_of_several_prompts_are_parsed_in_slices(separators: tuple[str, str]) -> None:
    given = {"allowed_token_ids": IDS, "n": 2, "prompt": [IDS[:50_000], [1, 2], IDS], "stop": "]"}
    body = json.dumps(given, separators=separators).encode()
    request = parse_body(CompletionRequest, body)
    assert request.prompts == [tuple(IDS[:50_000]), (1, 2), tuple(IDS)]
    assert (request.allowed_token_ids, request.n, request.stop) == (tuple(IDS), 2, "]")  # type: ignore[comparison-overlap]
    assert sum(1 for _ in parsing(CompletionRequest, body)) >= len(body) // 40_000
    tokens = json.dumps({"tokens": IDS}, separators=separators).encode()
    assert parse_body(DetokenizeRequest, tokens).tokens == tuple(IDS)  # type: ignore[comparison-overlap]


FLOODS = {
    "lists": b'{"messages": [' + b"[]," * 2_000_000 + b"0]}",
    "objects": b'{"messages": [{"a": [' + b"{}," * 2_000_000 + b"0]}]}",
    "names": b'{"user": {' + b'"a":1,' * 1_000_000 + b'"b":1}}',
    "numbers": b'{"prompt": [' + b"1.5," * 1_500_000 + b"0]}",
    "texts": b'{"prompt": ["a", ' + b'"",' * 2_000_000 + b'""]}',
    "ids": b'{"prompt": [' + b"1," * 3_000_000 + b"0]}",
    "ids in lists": b'{"prompt": [[' + b"1," * 600_000 + b"0], [" + b"1," * 600_000 + b"0]]}",
    "allowed ids": b'{"prompt": "a", "allowed_token_ids": [' + b"1," * 3_000_000 + b"0]}",
    "digits": b'{"user": [' + (b"9" * 4_000 + b",") * 1_000 + b"0]}",
    "backslashes": b'{"user": "' + b"\\\\" * 1_000_000 + b'", "a": [' + b"[]," * 1_000_000 + b"0]}",
    "another encoding": ('{"user": "\u2222", "a": [' + "[]," * 1_000_000 + "0]}").encode("utf-16"),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_what_takes_long_to_parse_is_refused_unparsed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, most = json.loads, 1 << 17

    def bounded(text: bytes, **kwargs: Any) -> Any:
        assert kind == "digits" or text.count(b",") < most, "too much is parsed at once"
        return loads(text, **kwargs)

    monkeypatch.setattr(json, "loads", bounded)
    with pytest.raises(InvalidRequestError, match=r"at most|UTF-8|more than 100 digits"):
        parse_body(CompletionRequest, FLOODS[kind])


def test_no_more_ids_are_decoded_than_hold_nothing_up() -> None:
    assert len(parse_body(DetokenizeRequest, json.dumps({"tokens": [5] * (1 << 17)}).encode()).tokens) == 1 << 17
    with pytest.raises(InvalidRequestError, match="tokens: has 131073 ids; at most 131072"):
        parse_body(DetokenizeRequest, json.dumps({"tokens": [5] * ((1 << 17) + 1)}).encode())


def test_blanks_of_megabytes_are_passed_at_once() -> None:
    body = b'{"prompt":' + b" " * 4_000_000 + b"[" + b" " * 4_000_000 + b"1, 2]}"
    assert parse_body(CompletionRequest, body).prompts == [(1, 2)]


def test_the_last_of_two_prompts_counts() -> None:
    long = b'"prompt": ' + json.dumps(IDS).encode()
    assert run(parse_body_json(b"{" + long + b', "prompt": "x"}')) == ({"prompt": "x"}, {})
    assert run(parse_body_json(b'{"prompt": "x", ' + long + b"}"))[0] == {"prompt": IDS}


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
    with pytest.raises(InvalidRequestError, match=f"{field}|body"):
        parse_body(CompletionRequest, json.dumps(given).encode())
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 512 << 10, "an error for each entry takes gigabytes"


def test_a_million_entries_of_logit_bias_are_refused_by_their_number() -> None:
    body = json.dumps({"prompt": "a", "logit_bias": {f"x{place}": 1 for place in range(1_000_000)}}).encode()
    with pytest.raises(InvalidRequestError, match=r"body: has .* separators of JSON"):
        parse_body(CompletionRequest, body)
    body = json.dumps({"prompt": "a", "logit_bias": {f"x{place}": 1 for place in range(10_000)}}).encode()
    with pytest.raises(InvalidRequestError, match="has 10000 entries; at most 1024"):
        parse_body(CompletionRequest, body)
