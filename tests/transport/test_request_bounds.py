"""Bounds of public requests: each is checked on the message, and said in the same words as by the SDK."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from outrider import limits
from outrider.client.requests import build_request
from outrider.cooperative import SLICE_ENTRIES, run
from outrider.errors import InvalidRequestError
from outrider.generation import GenerationRequest
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.packed_ids import reading_long
from outrider.transport.convert.bounds import check_request_message
from outrider.transport.convert.requests import request_from_proto, request_reading, request_to_proto, request_writing
from outrider.transport.convert.sampling import read_ids
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import sampling_pb2

SMALL = ModelLimits(num_token_ids=100, max_model_len=50)


def message(prompt_text: str = "x", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_text=prompt_text, **fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return message(sampling=sampling_pb2.SamplingParams(**fields))


def of_ids(count: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_token_ids=sampling_pb2.TokenSequence(token_ids=[1] * count))


AT_THE_BOUND = [
    message(stop=["s" * 4096] * 64),
    message(stop_token_ids=[1] * 1024),
    message(bad_words=["w"] * 1024),
    message(bad_words=["w" * 4096] * 16),
    message(request_id="r" * 256),
    sampling(logit_bias=[sampling_pb2.LogitBias(token_id=number, bias=1) for number in range(1024)]),
    sampling(bad_words=[sampling_pb2.TokenSequence(token_ids=[1])] * 1024),
    sampling(allowed_token_ids=[1] * 100),
    of_ids(49),
    message(resume=pb.Resumption(emitted_token_ids=[1] * 50, model="m" * 1024)),
    message("p" * 2_000_000),
]

PAST_THE_BOUND = [
    ("stop", "has 65 texts; at most 64", message(stop=["s"] * 65), {"stop": ["s"] * 65}),
    ("stop", "has 4097 characters in one text; at most 4096", message(stop=["s" * 4097]), {"stop": "s" * 4097}),
    (
        "stop_token_ids",
        "has 1025 ids; at most 1024",
        message(stop_token_ids=[1] * 1025),
        {"stop_token_ids": [1] * 1025},
    ),
    ("bad_words", "has 1025 entries; at most 1024", message(bad_words=["w"] * 1025), {"bad_words": ["w"] * 1025}),
    (
        "bad_words",
        "has 4097 characters in one word; at most 4096",
        message(bad_words=["w" * 4097]),
        {"bad_words": ["w" * 4097]},
    ),
    (
        "bad_words",
        "has 65537 characters in all; at most 65536",
        message(bad_words=["w" * 4096] * 16 + ["w"]),
        {"bad_words": ["w" * 4096] * 16 + ["w"]},
    ),
    ("request_id", "has 257 characters; at most 256", message(request_id="r" * 257), {"request_id": "r" * 257}),
    ("cache_salt", "has 257 characters; at most 256", message(cache_salt="r" * 257), {"cache_salt": "r" * 257}),
    (
        "logit_bias",
        "has 1025 entries; at most 1024",
        sampling(logit_bias=[sampling_pb2.LogitBias()] * 1025),
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    (
        "allowed_token_ids",
        "has 1048577 ids; at most 1048576",
        sampling(allowed_token_ids=[1] * 1048577),
        {"allowed_token_ids": [1] * 1048577},
    ),
    ("prompt", "has 2000001 characters; at most 2000000", message("p" * 2_000_001), {"prompt": "p" * 2_000_001}),
    (
        "prompt_token_ids",
        "has 1000001 ids; at most 1000000",
        of_ids(1_000_001),
        {"prompt": None, "prompt_token_ids": [1] * 1_000_001},
    ),
]


@pytest.mark.parametrize("asked", AT_THE_BOUND, ids=range(len(AT_THE_BOUND)))
def test_a_request_at_the_bound_passes(asked: pb.GenerateRequest) -> None:
    check_request_message(asked, SMALL)


@pytest.mark.parametrize(
    ("field", "found", "asked", "options"), PAST_THE_BOUND, ids=[case[1] for case in PAST_THE_BOUND]
)
def test_a_request_past_the_bound_is_refused_alike_by_the_server_and_the_sdk(
    field: str, found: str, asked: pb.GenerateRequest, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError) as on_server:
        request_from_proto(asked)
    with pytest.raises(InvalidRequestError) as in_sdk:
        build_request({"prompt": "x", **options})  # type: ignore[typeddict-item]
    assert str(on_server.value) == str(in_sdk.value) == f"{field}: {found}"
    assert on_server.value.field == in_sdk.value.field == field


@pytest.mark.parametrize(
    ("field", "found", "asked"),
    [
        (
            "allowed_token_ids",
            "has 101 ids; at most 100, as many as the vocabulary",
            sampling(allowed_token_ids=[1] * 101),
        ),
        ("prompt_token_ids", "has 50 tokens; at most 49 leave room for one of output", of_ids(50)),
        (
            "bad_words",
            "has 1025 entries; at most 1024",
            message(bad_words=["w"], sampling={"bad_words": [{"token_ids": [1]}] * 1024}),
        ),
        (
            "bad_words",
            "has 131073 token ids in all; at most 131072",
            sampling(bad_words=[{"token_ids": [1] * 131_073}]),
        ),
        (
            "resume.emitted_token_ids",
            "has 51 ids; at most 50 fit the model after the prompt",
            message(resume=pb.Resumption(emitted_token_ids=[1] * 51)),
        ),
        ("resume.model", "has 1025 characters; at most 1024", message(resume=pb.Resumption(model="m" * 1025))),
    ],
    ids=["vocabulary", "model length", "texts and ids", "ids in all", "emitted", "model name"],
)
def test_what_only_the_server_knows_is_refused_on_the_message(
    field: str, found: str, asked: pb.GenerateRequest
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request_message(asked, SMALL)
    assert str(caught.value) == f"{field}: {found}"


def test_every_repeated_field_of_a_request_has_a_bound() -> None:
    """A field that is added to the messages fails here until it has a bound."""
    repeated = {
        field.name
        for descriptor in (
            pb.GenerateRequest.DESCRIPTOR,
            pb.Resumption.DESCRIPTOR,
            sampling_pb2.SamplingParams.DESCRIPTOR,
        )
        for field in descriptor.fields
        if field.is_repeated
    }
    lists = {"stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "emitted_token_ids"}
    assert repeated == lists


def test_a_model_that_is_not_known_yet_allows_what_any_may() -> None:
    assert ANY_MODEL.num_token_ids == limits.ALLOWED_TOKEN_IDS.most
    check_request_message(of_ids(limits.PROMPT_TOKENS.most), ANY_MODEL)


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_all_text_of_a_chat_has_a_bound(field: str) -> None:
    text = ["x" * (limits.PROMPT_CHARACTERS.most // 2)] * 3
    asked = pb.GenerateRequest(chat={f"{field}_json": text})
    with pytest.raises(InvalidRequestError, match="has 3000000 characters; at most 2000000") as caught:
        check_request_message(asked, ANY_MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "name"), [("chat_template", "chat_template"), ("template_kwargs_json", "chat_template_kwargs")]
)
def test_templates_and_their_variables_have_bounds(field: str, name: str) -> None:
    most = {"chat_template": limits.CHAT_TEMPLATE, "chat_template_kwargs": limits.CHAT_TEMPLATE_KWARGS}[name].most
    check_request_message(pb.GenerateRequest(chat={field: "a" * most}), ANY_MODEL)
    with pytest.raises(InvalidRequestError, match=f"{name}: has {most + 1} characters"):
        check_request_message(pb.GenerateRequest(chat={field: "a" * (most + 1)}), ANY_MODEL)


def test_packed_ids_of_a_prompt_are_the_same_ids_and_have_the_same_bounds() -> None:
    token_ids = tuple(range(limits.PROMPT_TOKENS.most))[-3 * SLICE_ENTRIES :]
    sent = GenerationRequest(prompt_token_ids=token_ids, max_tokens=7)
    written = request_to_proto(sent)
    assert written.packed_prompt_token_ids == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert sum(1 for _ in request_writing(sent)) >= len(token_ids) // SLICE_ENTRIES
    for read_prompt in (read_ids, reading_long):
        assert run(request_reading(written, read_prompt=read_prompt)).prompt_token_ids == token_ids
    few = pb.GenerateRequest(packed_prompt_token_ids=struct.pack("<3I", 7, (1 << 32) - 1, 0))
    assert request_from_proto(few).prompt_token_ids == (7, (1 << 32) - 1, 0)
    with pytest.raises(InvalidRequestError, match=r"^prompt_token_ids: has 50 tokens; at most 49 leave room"):
        check_request_message(pb.GenerateRequest(packed_prompt_token_ids=bytes(4 * 50)), SMALL)
    with pytest.raises(InvalidRequestError, match=r"^packed_prompt_token_ids: has 7 bytes; each id has 4"):
        request_from_proto(pb.GenerateRequest(packed_prompt_token_ids=bytes(7)))
    with pytest.raises(InvalidRequestError, match=r"^prompt_token_ids: has 1000001 ids; at most 1000000"):
        request_from_proto(pb.GenerateRequest(packed_prompt_token_ids=bytes(4_000_004)))


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_an_id_that_does_not_fit_is_refused_when_it_is_packed(number: int) -> None:
    with pytest.raises(InvalidRequestError, match="out of range"):
        request_to_proto(GenerationRequest(prompt_token_ids=(*range(SLICE_ENTRIES), number)))
