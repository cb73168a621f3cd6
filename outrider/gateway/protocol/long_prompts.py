"""Long prompts of token ids in a JSON body, parsed in slices: parsing 100,000 ids at once holds up an event loop.

The ids are cut out of the body, a mark takes their place, and the rest is parsed as ever. Where anything about that is
not as expected, the body is parsed whole.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from outrider.cooperative import Work

LONG_BYTES = 1 << 16
_SLICE_BYTES = 1 << 15
_KEY = b'"prompt"'
_BLANKS = b" \t\r\n"
_OF_IDS = b"0123456789," + _BLANKS
_MARK = secrets.token_hex(16)
"""Nothing that a caller sends is taken for it."""


def parse_json(body: bytes) -> Work[tuple[Any, tuple[int, ...] | None]]:
    """The value of a body, and the ids that its ``prompt`` is a long list of; the list in the value is then ``[0]``.

    Errors are those of ``json.loads``.
    """
    found = _find_ids(body) if len(body) > LONG_BYTES else None
    if found is None:
        return json.loads(body), None
    start, end = found
    ids: list[int] = []
    while start < end:
        stop = body.find(b",", start + _SLICE_BYTES, end)
        stop = end if stop < 0 else stop
        part = body[start:stop]
        if part.translate(None, _OF_IDS):
            return json.loads(body), None
        try:
            found_ids = json.loads(b"[" + part + b"]")
        except ValueError:
            return json.loads(body), None
        if not found_ids:  # blanks between two commas, or instead of all
            return json.loads(body), None
        ids += found_ids
        start = stop + 1
        yield
    if start == end:  # the last sign is a comma
        return json.loads(body), None
    value = json.loads(body[: found[0]] + f'"{_MARK}"'.encode() + body[end:])
    if not isinstance(value, dict) or value.get("prompt") != [_MARK]:
        return json.loads(body), None
    return {**value, "prompt": [0]}, tuple(ids)


def _find_ids(body: bytes) -> tuple[int, int] | None:
    """Where the entries of a list begin and end that may be the body's prompt."""
    key = body.find(_KEY)
    position = _after(body, b":", key + len(_KEY)) if key >= 0 else -1
    position = _after(body, b"[", position) if position >= 0 else -1
    end = body.find(b"]", position) if position >= 0 else -1
    return (position, end) if end > position else None


def _after(body: bytes, sign: bytes, position: int) -> int:
    """Behind a sign that stands there, blanks apart; -1 if another does."""
    while body[position : position + 1] and body[position : position + 1] in _BLANKS:
        position += 1
    return position + 1 if body[position : position + 1] == sign else -1
