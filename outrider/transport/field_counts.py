"""Field count of a message, on its bytes: an entry of two bytes takes thirty once parsed, and there may be millions.

Counts no further than any message goes, and skips what a field holds unless it holds fields. Ids in one packed field,
which take four times their bytes once parsed, and texts, which take three times, are compared with their bounds too.
Everything else about a message is for its parser to say.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from outrider.cooperative import Work, run
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
_FIELDS_OF_SLICE = 8192
_NO_ITEMS = 16
"""Fields of a link's message beside its commands or events."""
FEWEST_BYTES = 2
"""A field takes at least its tag and one byte."""
MOST_VARINT_BYTES = 10
"""64 bits, of which a byte has seven."""


def check_num_fields(data: bytes, message: Any, most: Bound = REQUEST_FIELDS) -> None:  # noqa: ANN401 - descriptors
    """Raise ``InvalidRequestError`` naming the commonest field when the bytes of a ``message`` hold too many fields, or
    naming a field that holds too many ids or too long a text.
    """
    if may_have_more(data, most):
        run(counting_fields(data, message, most))


def may_have_more(data: bytes, most: Bound) -> bool:
    """True if this number of bytes can hold more fields than that."""
    return len(data) > FEWEST_BYTES * most.most


def counting_fields(data: bytes, message: Any, most: Bound, most_items: Bound | None = None) -> Work[None]:  # noqa: ANN401
    """``check_num_fields`` with pauses. ``most_items``: of the message's own fields, without those in them."""
    counting = _Counting(data, most.most, most.most if most_items is None else most_items.most + _NO_ITEMS)
    try:
        yield from counting.count(message)
    except (IndexError, ValueError):  # cut inside a number, or no number at all: the parser says so
        return
    if counting.num_items_left < 0 and most_items is not None:
        name, count = counting.counts.most_common(1)[0]
        raise InvalidRequestError(name, f"has {count} {most_items.unit} or more; at most {most_items.most}")
    if counting.num_left < 0:
        name, count = counting.counts.most_common(1)[0]
        bound = _BOUNDS.get(name, most)
        raise InvalidRequestError(name, f"has {count} {bound.unit} or more, one by one; at most {bound.most}")


class _Counting:
    def __init__(self, data: bytes, most: int, most_items: int) -> None:
        self.counts: Counter[str] = Counter()
        self.num_left = most
        """Fields that there may still be; negative: there are too many."""
        self.num_items_left = most_items
        self._num_ids: Counter[str] = Counter()
        self._sequence = ""
        """The field whose ids a sequence of tokens holds."""
        self._data = data

    def count(self, message: Any) -> Work[None]:  # noqa: ANN401 - descriptors have several types
        """The fields of a message, and of those in it."""
        data, outer = self._data, list[tuple[int, Any]]()
        position, end = 0, len(data)
        while position < end and self.num_left >= 0 and self.num_items_left >= 0:
            tag, position = read_varint(data, position)
            field = message.fields_by_number.get(tag >> 3)
            self.counts["request" if field is None else field.name] += 1
            self.num_left -= 1
            self.num_items_left -= not outer
            if self.num_left % _FIELDS_OF_SLICE == 0:
                yield
            kind = tag & 7
            if kind == _LENGTH:
                length, position = read_varint(data, position)
                after = position + length
                inner = self._check_content(position, min(after, end), field, message) if length and field else None
                if inner is not None:
                    outer.append((end, message))
                    end, message = min(after, end), inner
                else:
                    position = after
            elif kind == _VARINT:
                _, position = read_varint(data, position)
            elif kind in (_FIXED_32, _FIXED_64):
                position += 4 if kind == _FIXED_32 else 8
            elif kind not in (_GROUP, _GROUP_END):  # what a group holds is counted as if it stood here
                return
            while position >= end and outer:
                end, message = outer.pop()

    def _check_content(self, position: int, end: int, field: Any, message: Any) -> Any:  # noqa: ANN401
        """The type of a field that holds fields; None for others."""
        if field.message_type is not None:
            self._sequence = field.full_name
            return field.message_type
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
        return None


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
