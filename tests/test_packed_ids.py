"""Packed token ids: the same ids, with bytes and bounds that are theirs."""

from __future__ import annotations

import copy
import struct

import pytest

from outrider.cooperative import run
from outrider.packed_ids import MIN_PACKED_IDS, pack_long, reading_long, unpack_long
from outrider.prefix_hash import PrefixHasher
from outrider.transport.convert.requests import request_from_proto, request_reading
from outrider.types import PackedTokenIds, are_within, pack_token_ids, part_of
from outrider.v1 import generation_pb2 as pb

LONG = tuple((7919 * place) % 128_000 for place in range(3 * MIN_PACKED_IDS + 5))
SHORT = LONG[: MIN_PACKED_IDS - 1]


def as_bytes(token_ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def packed(token_ids: tuple[int, ...]) -> PackedTokenIds:
    found = pack_long(token_ids)
    assert isinstance(found, PackedTokenIds)
    return found


@pytest.mark.parametrize("token_ids", [(), SHORT, LONG])
def test_ids_of_any_source_are_the_same_and_packed_if_they_are_many(token_ids: tuple[int, ...]) -> None:
    message = pb.GenerateRequest()
    message.prompt_token_ids.token_ids.extend(token_ids)
    read = run(request_reading(message, read_prompt=reading_long)).prompt_token_ids or ()
    for found in (pack_long(list(token_ids)), unpack_long(as_bytes(token_ids)), read):
        assert found == token_ids
        assert pack_token_ids(found) == as_bytes(token_ids)
        assert isinstance(found, PackedTokenIds) == (token_ids is LONG)
        if isinstance(found, PackedTokenIds):
            assert (found.least, found.largest) == (min(token_ids), max(token_ids))
    assert pack_long(found) is found


def test_ids_beyond_31_bits_are_left_to_the_checks_of_a_request() -> None:
    message = pb.GenerateRequest()
    message.prompt_token_ids.token_ids.extend((*LONG, 1 << 31))
    found = run(request_reading(message, read_prompt=reading_long))
    assert found == request_from_proto(message)
    assert not isinstance(found.prompt_token_ids, PackedTokenIds)


@pytest.mark.parametrize(("start", "stop"), [(0, len(LONG)), (0, 300), (17, 400), (500, len(LONG)), (5, 5)])
def test_a_part_is_that_of_a_tuple(start: int, stop: int) -> None:
    whole = packed(LONG)
    found = part_of(whole, start, stop)
    assert found == LONG[start:stop] == part_of(LONG, start, stop)
    assert isinstance(found, PackedTokenIds)
    assert pack_token_ids(found) == as_bytes(LONG[start:stop]) == pack_token_ids(whole, start, stop)
    assert copy.deepcopy(found) == found


def test_bounds_of_the_whole_never_refuse_a_part() -> None:
    part = part_of(packed((*LONG, 200_000)), 0, len(LONG))
    assert are_within(part, 0, 128_000)  # the whole is not
    assert are_within(part, 0, 200_000)
    assert not are_within(part, 1, 200_000)
    assert not are_within(part, 0, max(LONG) - 1)
    assert are_within((), 1, 0)


def test_packed_ids_have_the_prefix_hashes_of_others() -> None:
    for length in (0, 255, 256, 600, len(LONG)):
        assert PrefixHasher(b"key").at(packed(LONG), length) == PrefixHasher(b"key").at(list(LONG), length)
