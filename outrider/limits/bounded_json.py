"""Bounded JSON: parsing of callers' JSON that holds an event loop up for tens of milliseconds at most, whatever it is.

``json.loads`` is one C call: nothing else of the process runs meanwhile. Its time grows with the number of lists,
objects, names and numbers, which are counted first, in slices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from outrider.cooperative import Work
from outrider.limits import JSON_VALUES

_STRUCTURE = b"[{,:"
_OTHER_BYTES = bytes(set(range(256)) - set(_STRUCTURE))
SLICE_BYTES = 1 << 16
"""Bytes counted at once; a copy of a slice is made."""
_MOST_DIGITS = 100
"""Bound on the digits of a whole number: the time of converting one grows with their square."""


def parse_json(text: bytes | str) -> Any:  # noqa: ANN401 - JSON
    """``json.loads`` of a text whose values were checked; ``ValueError`` for a whole number of too many digits."""
    return json.loads(text, parse_int=_whole_number)


def checks_of_json(field: str, texts: Iterable[bytes]) -> Work[None]:
    """Raise ``InvalidRequestError`` if UTF-8 texts that are JSON have more values in all than may be parsed.

    Texts that are no JSON are counted up to their first error at least.
    """
    num_left = JSON_VALUES.most
    for text in texts:
        most = yield from _most_values(text)
        num_left -= most if most <= num_left else (yield from _num_values(text, num_left))
        if num_left < 0:
            JSON_VALUES.check(field, JSON_VALUES.most - num_left)


def _most_values(text: bytes) -> Work[int]:
    """Upper bound of the number of values: what texts contain is counted too, which is cheap."""
    count = 0
    for start in range(0, len(text), SLICE_BYTES):
        if start:
            yield
        count += len(text[start : start + SLICE_BYTES].translate(None, _OTHER_BYTES))
    return count


def _num_values(text: bytes, most: int) -> Work[int]:
    """Lists, objects, names and separators outside of texts; the count ends above ``most``."""
    count, is_in_text, is_escaped = 0, False, False
    for start in range(0, len(text), SLICE_BYTES):
        part = text[start + is_escaped : start + SLICE_BYTES]
        is_escaped = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = pieces[1::2] if is_in_text else pieces[::2]
        count += len(b"".join(outside).translate(None, _OTHER_BYTES))
        is_in_text ^= len(pieces) % 2 == 0
        if count > most:
            break
        yield
    return count


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number of more than {_MOST_DIGITS} digits")
    return int(digits)
