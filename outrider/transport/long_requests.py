"""Long requests: generation requests whose prompt has so many token ids that reading or writing the message at once
would hold up an event loop. Their messages are parsed and serialized in slices.

A prompt's ids are one packed field. A part of it is a message of the same type, and messages that are parsed one after
the other into one object, or whose bytes stand one after the other, are merged: repeated fields grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from google.protobuf.message import DecodeError

from outrider.cooperative import SLICE_ENTRIES, Work, is_long, slices_of
from outrider.generation import GenerationRequest
from outrider.limits import UNUSED_BYTES
from outrider.transport.convert.requests import refusing_numbers_out_of_range, request_writing
from outrider.transport.field_counts import MOST_VARINT_BYTES, read_varint
from outrider.transport.malformed import malformed
from outrider.v1 import generation_pb2 as pb
from outrider.v1.sampling_pb2 import TokenSequence

LONG_BYTES = 1 << 16
"""Messages of more bytes are parsed in slices."""
_LENGTH_DELIMITED = 2
_PROMPT_TAG = pb.GenerateRequest.PROMPT_TOKEN_IDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_IDS_TAG = TokenSequence.TOKEN_IDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_SLICE_BYTES = 2 * SLICE_ENTRIES
_CONTINUING = bytes(range(0x80, 0x100))


@dataclass(frozen=True, slots=True)
class LongRequest:
    """Bytes of a ``GenerateRequest`` that are not parsed yet."""

    data: bytes


def long_or_parsed(data: bytes) -> pb.GenerateRequest | LongRequest:
    """The deserializer of requests: parses short ones."""
    return LongRequest(data) if len(data) > LONG_BYTES else pb.GenerateRequest.FromString(data)


def parsing(data: bytes, check_prompt: Callable[[int], None]) -> Work[pb.GenerateRequest]:
    """The request that the bytes are, with pauses; ``InvalidRequestError`` if they are none.

    ``check_prompt`` is called with the number of prompt ids before any is parsed.
    """
    try:
        runs = _find_ids(data)
        if runs is None:
            return _parsed(data)
        count = 0
        for run in runs:
            count += yield from _count_ids(data, run)
        check_prompt(count)
        message = _parsed(_without(data, runs))
        if message.WhichOneof("prompt") is not None:  # two prompts: the last counts
            return _parsed(data)
        for run in runs:
            for part in _parts_of(data, run):
                message.MergeFromString(part)
                yield
    except (DecodeError, ValueError, IndexError) as error:
        raise malformed(data) from error
    return message


def writing(request: GenerationRequest) -> Work[pb.GenerateRequest | bytes]:
    """The message of a request, or its bytes where the prompt has many ids, with pauses.

    ``InvalidRequestError`` for a number that does not fit.
    """
    ids = request.prompt_token_ids
    if ids is None or not is_long(ids):
        return (yield from request_writing(request))
    message = yield from request_writing(replace(request, prompt_token_ids=()))
    parts = [message.SerializeToString()]
    for part in slices_of(ids):
        with refusing_numbers_out_of_range():
            prompt = pb.GenerateRequest(prompt_token_ids=TokenSequence(token_ids=part))
        parts.append(prompt.SerializeToString())
        yield
    return b"".join(parts)


def _parsed(data: bytes) -> pb.GenerateRequest:
    """The request; ``InvalidRequestError`` if too much of its bytes is not part of it."""
    message = pb.GenerateRequest.FromString(data)
    message.DiscardUnknownFields()
    UNUSED_BYTES.check("request", len(data) - message.ByteSize())
    return message


class _Run(NamedTuple):
    """A prompt field of packed ids: where it begins, where its ids do, and where both end."""

    start: int
    ids: int
    end: int


def _find_ids(data: bytes) -> list[_Run] | None:
    """The prompt's fields; None where one of them holds anything but packed ids, or where there is none."""
    position, runs = 0, []
    while position < len(data):
        start = position
        tag, position = read_varint(data, position)
        if tag & 7 != _LENGTH_DELIMITED:
            position = _after_scalar(data, tag & 7, position)
            continue
        length, position = read_varint(data, position)
        end = position + length
        if end > len(data):
            return None
        if tag == _PROMPT_TAG:
            ids = end
            if length:
                ids_tag, ids = read_varint(data, position)
                length, ids = read_varint(data, ids)
                if ids_tag != _IDS_TAG or ids + length != end:
                    return None
            runs.append(_Run(start, ids, end))
        position = end
    return runs if any(run.ids < run.end for run in runs) else None


def _after_scalar(data: bytes, kind: int, position: int) -> int:
    if kind == 0:
        return read_varint(data, position)[1]
    if kind in (1, 5):
        return position + (8 if kind == 1 else 4)
    raise DecodeError("a group")


def _without(data: bytes, runs: list[_Run]) -> bytes:
    edges = [0, *(edge for run in runs for edge in (run.start, run.end)), len(data)]
    return b"".join(data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def _count_ids(data: bytes, run: _Run) -> Work[int]:
    """Numbers of a run: each has one byte without the highest bit, its last."""
    count = 0
    for begin in range(run.ids, run.end, _SLICE_BYTES):
        count += len(data[begin : min(begin + _SLICE_BYTES, run.end)].translate(None, _CONTINUING))
        yield
    return count


def _parts_of(data: bytes, run: _Run) -> Iterator[bytes]:
    """A run in short ones of whole numbers."""
    position = run.ids
    while position < run.end:
        stop = min(position + _SLICE_BYTES, run.end)
        longest = stop + MOST_VARINT_BYTES
        while stop < run.end and data[stop - 1] & 0x80:
            stop += 1
            if stop > longest:
                raise DecodeError("an id that does not end")
        yield _prompt_of(data[position:stop])
        position = stop


def _prompt_of(packed_ids: bytes) -> bytes:
    """A request whose prompt is these ids."""
    ids = bytes((_IDS_TAG,)) + _varint(len(packed_ids)) + packed_ids
    return bytes((_PROMPT_TAG,)) + _varint(len(ids)) + ids


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))
