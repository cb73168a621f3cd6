"""Requests with many token ids, parsed and written in slices."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError

from outrider.cooperative import SLICE_ENTRIES, run
from outrider.errors import InvalidRequestError
from outrider.generation import GenerationRequest
from outrider.transport.convert.requests import request_from_proto, request_to_proto
from outrider.transport.long_requests import (
    LongRequest,
    _parts_of,
    _prompt_of,
    _Run,
    _varint,
    long_or_parsed,
    parsing,
    writing,
)
from outrider.v1 import generation_pb2 as pb
from outrider.v1.sampling_pb2 import TokenSequence

RNG = random.Random(4)
IDS = tuple(RNG.choice((RNG.randrange(128), RNG.randrange(1 << 15), RNG.randrange(1 << 31))) for _ in range(50_000))
REQUEST = GenerationRequest(prompt_token_ids=IDS, max_tokens=7, stop=("end",), request_id="r")


def check_nothing(count: int) -> None:
    """Take any number of ids."""


def test_a_long_request_is_written_in_slices_and_parsed_in_slices() -> None:
    data = run(writing(REQUEST))
    assert isinstance(data, bytes)
    assert sum(1 for _ in writing(REQUEST)) >= len(IDS) // SLICE_ENTRIES
    assert request_from_proto(pb.GenerateRequest.FromString(data)) == REQUEST
    assert request_from_proto(run(parsing(data, check_nothing))) == REQUEST
    assert sum(1 for _ in parsing(data, check_nothing)) >= 2 * len(IDS) // SLICE_ENTRIES


def test_one_packed_field_is_parsed_in_slices() -> None:
    data = request_to_proto(REQUEST).SerializeToString()
    long = long_or_parsed(data)
    assert isinstance(long, LongRequest)
    counts: list[int] = []
    assert request_from_proto(run(parsing(long.data, counts.append))) == REQUEST
    assert counts == [len(IDS)]
    assert sum(1 for _ in parsing(data, check_nothing)) >= 2 * len(IDS) // SLICE_ENTRIES


def test_too_many_ids_are_refused_before_any_is_parsed() -> None:
    def refuse(count: int) -> None:
        raise InvalidRequestError("prompt_token_ids", f"has {count}")

    data = request_to_proto(REQUEST).SerializeToString()
    with pytest.raises(InvalidRequestError, match=f"has {len(IDS)}"):
        run(parsing(data, refuse))


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(prompt_text="x" * 100_000),
        pb.GenerateRequest(resume=pb.Resumption(emitted_token_ids=IDS)),
        pb.GenerateRequest(prompt_token_ids=TokenSequence(token_ids=IDS), bad_words=["a"] * 1000, seed=1 << 63),
    ],
)
def test_other_long_messages_are_parsed_as_ever(message: pb.GenerateRequest) -> None:
    assert run(parsing(message.SerializeToString(), check_nothing)) == message


def test_the_last_of_several_prompts_counts() -> None:
    ids = pb.GenerateRequest(prompt_token_ids=TokenSequence(token_ids=IDS[:20_000])).SerializeToString()
    text = pb.GenerateRequest(prompt_text="hi").SerializeToString()
    for data in (ids + text, text + ids, ids + ids):
        assert run(parsing(data, check_nothing)) == pb.GenerateRequest.FromString(data)


@pytest.mark.parametrize("ids", [(), IDS])
@pytest.mark.parametrize("num_bytes", [1 << 15, 1 << 17])
@pytest.mark.parametrize("field_number", [999, pb.GenerateRequest.REQUEST_ID_FIELD_NUMBER])
def test_bytes_that_are_not_used_are_bounded(ids: tuple[int, ...], num_bytes: int, field_number: int) -> None:
    """gRPC holds them while the stream runs, so that a few streams would take gigabytes."""
    asked = pb.GenerateRequest(prompt_token_ids=TokenSequence(token_ids=ids), request_id="r")
    unused = _varint(field_number << 3 | 2) + _varint(num_bytes) + b"x" * num_bytes
    data = unused + asked.SerializeToString()
    if num_bytes < 1 << 16:
        assert run(parsing(data, check_nothing)) == asked
    else:
        with pytest.raises(InvalidRequestError, match=r"request: has \d+ bytes of unknown fields, or .* at most 65536"):
            run(parsing(data, check_nothing))


def test_bytes_that_are_no_message_are_refused() -> None:
    data = bytearray(request_to_proto(REQUEST).SerializeToString())
    for position in (*range(20), len(data) // 2, len(data) - 1):
        broken = bytes(data[:position]) + b"\xff" + bytes(data[position + 1 :])
        for cut in (broken, broken[: len(broken) - 1000], broken + b"\x0b"):
            try:
                expected = pb.GenerateRequest.FromString(cut)
            except Exception:
                with pytest.raises(InvalidRequestError):
                    run(parsing(cut, check_nothing))
            else:
                assert run(parsing(cut, check_nothing)) == expected


def test_an_id_that_does_not_end_is_refused_where_it_begins() -> None:
    ids = b"\x05" * 20_000 + b"\x80" * 5_000_000
    data = _prompt_of(ids)
    parts = _parts_of(data, _Run(0, len(data) - len(ids), len(data)))
    assert len(next(parts)) < 20_000
    with pytest.raises(DecodeError):
        next(parts)
    with pytest.raises(InvalidRequestError, match="no message"):
        run(parsing(data, check_nothing))


def test_an_id_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="out of range"):
        run(writing(GenerationRequest(prompt_token_ids=(*IDS, 1 << 40))))
