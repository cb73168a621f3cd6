"""Field count of a message, on its bytes: an entry of two bytes takes thirty once parsed, and there may be millions.

Counts no further than any message goes, and skips what a field holds unless it holds fields. Ids in one packed field,
which take four times their bytes once parsed, and texts, which take three times, are compared with their bounds too.
Everything else about a message is for its parser to say.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.limits import (
    ALLOWED_TOKEN_IDS,
    BAD_WORD,
    BAD_WORDS,
    BAD_WORDS_TOKENS,
    CACHE_SALT,
    EMITTED,
    EMITTED_TOKEN_IDS,
    LOGIT_BIAS,
    MODEL_NAME,
    PROMPT_CHARACTERS,
    PROMPT_TOKENS,
    REQUEST_FIELDS,
    REQUEST_ID,
    STOP_TEXT,
    STOP_TEXTS,
    STOP_TOKEN_IDS,
    Bound,
)

_VARINT, _FIXED_64, _LENGTH, _GROUP, _GROUP_END, _FIXED_32 = range(6)
_BOUNDS = {"bad_words": BAD_WORDS, "logit_bias": LOGIT_BIAS, "stop": STOP_TEXTS, "stop_token_ids": STOP_TOKEN_IDS}
_IDS = {
    "outrider.v1.GenerateRequest.prompt_token_ids": ("prompt_token_ids", PROMPT_TOKENS),
    "outrider.v1.GenerateRequest.stop_token_ids": ("stop_token_ids", STOP_TOKEN_IDS),
    "outrider.v1.Resumption.emitted_token_ids": (EMITTED, EMITTED_TOKEN_IDS),
    "outrider.v1.SamplingParams.allowed_token_ids": ("allowed_token_ids", ALLOWED_TOKEN_IDS),
    "outrider.v1.SamplingParams.bad_words": ("bad_words", BAD_WORDS_TOKENS),
}
"""Fields that are packed ids, or sequences of tokens, which are messages of nothing else."""
_SEQUENCE = "outrider.v1.TokenSequence"
_TEXTS = {
    "outrider.v1.GenerateRequest.prompt_text": ("prompt", PROMPT_CHARACTERS),
    "outrider.v1.GenerateRequest.bad_words": ("bad_words", BAD_WORD),
    "outrider.v1.GenerateRequest.stop": ("stop", STOP_TEXT),
    "outrider.v1.GenerateRequest.request_id": ("request_id", REQUEST_ID),
    "outrider.v1.GenerateRequest.cache_salt": ("cache_salt", CACHE_SALT),
    "outrider.v1.Resumption.model": ("resume.model", MODEL_NAME),
}
_MOST_CHARACTER_BYTES = 4
_CONTINUING = bytes(range(0x80, 0x100))
_SLICE_BYTES = 1 << 16
_FEWEST_BYTES = 2
"""A field takes at least its tag and one byte."""
MOST_VARINT_BYTES = 10
"""64 bits, of which a byte has seven."""


def check_num_fields(data: bytes, message: Any, most: Bound = REQUEST_FIELDS) -> None:  # noqa: ANN401 - descriptors
    """Raise ``InvalidRequestError`` naming the commonest field when the bytes of a ``message`` hold too many fields, or
    naming a field that holds too many ids or too long a text.
    """
    if len(data) <= _FEWEST_BYTES * most.most:
        return
    counting = _Counting(data, most.most)
    try:
        counting.count(0, len(data), message)
    except (IndexError, ValueError):  # cut inside a number, or no number at all: the parser says so
        return
    if counting.num_left < 0:
        name, count = counting.counts.most_common(1)[0]
        bound = _BOUNDS.get(name, most)
        raise InvalidRequestError(name, f"has {count} {bound.unit} or more, one by one; at most {bound.most}")


class _Counting:
    def __init__(self, data: bytes, most: int) -> None:
        self.counts: Counter[str] = Counter()
        self.num_left = most
        """Fields that there may still be; negative: there are too many."""
        self._num_ids: Counter[str] = Counter()
        self._sequence = ""
        """The field whose ids a sequence of tokens holds."""
        self._data = data

    def count(self, position: int, end: int, message: Any) -> None:  # noqa: ANN401 - descriptors have several types
        """The fields of one message between two places, and of those in it."""
        data, fields = self._data, message.fields_by_number
        while position < end and self.num_left >= 0:
            tag, position = read_varint(data, position)
            field = fields.get(tag >> 3)
            self.counts["request" if field is None else field.name] += 1
            self.num_left -= 1
            kind = tag & 7
            if kind == _LENGTH:
                length, position = read_varint(data, position)
                if length and field is not None:
                    self._check_content(position, min(position + length, end), field, message)
                    if field.message_type is not None:
                        self.count(position, min(position + length, end), field.message_type)
                position += length
            elif kind == _VARINT:
                _, position = read_varint(data, position)
            elif kind in (_FIXED_32, _FIXED_64):
                position += 4 if kind == _FIXED_32 else 8
            elif kind not in (_GROUP, _GROUP_END):  # what a group holds is counted as if it stood here
                return

    def _check_content(self, position: int, end: int, field: Any, message: Any) -> None:  # noqa: ANN401
        if field.message_type is not None:
            self._sequence = field.full_name
            return
        if found := _TEXTS.get(field.full_name):
            name, bound = found
            if end - position > _MOST_CHARACTER_BYTES * bound.most:
                raise InvalidRequestError(name, f"has {end - position} bytes; at most {bound.most} {bound.unit}")
        elif found := _IDS.get(self._sequence if message.full_name == _SEQUENCE else field.full_name):
            name, bound = found
            self._num_ids[name] += sum(
                len(self._data[begin : min(begin + _SLICE_BYTES, end)].translate(None, _CONTINUING))
                for begin in range(position, end, _SLICE_BYTES)
            )
            bound.check(name, self._num_ids[name])


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A varint, and where what follows it begins; ``ValueError`` for one that does not end, whose sum would grow with
    every byte.
    """
    value = shift = 0
    while (byte := data[position]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if shift >= 7 * MOST_VARINT_BYTES:
            raise ValueError("a varint has more than 10 bytes")
    return value | byte << shift, position + 1
