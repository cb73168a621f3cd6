"""Long lists of token ids in a JSON body, parsed in slices: parsing 100,000 ids at once holds up an event loop.

The ids are cut out of the body, a mark takes their place, and the rest is parsed as ever, if it has no more values than
may be parsed at once. Where anything about a list is not as expected, it is part of the rest.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from outrider.cooperative import Work
from outrider.limits import ALLOWED_TOKEN_IDS, DETOKENIZED_TOKENS, PROMPT_TOKENS, Bound
from outrider.limits.bounded_json import checks_of_json, parse_json

LONG_BYTES = 1 << 16
"""Length from which a list of ids is read in slices, so that other streams go on."""
_SLICE_BYTES = 1 << 15
_FIELDS = {"prompt": PROMPT_TOKENS, "tokens": DETOKENIZED_TOKENS, "allowed_token_ids": ALLOWED_TOKEN_IDS}
_MOST_LISTS = 1024
"""Prompts of one request."""
_OF_IDS = b"0123456789, \t\r\n"
_BLANKS = re.compile(rb"[ \t\r\n]*")
_MARK = secrets.token_hex(16)
"""Nothing that a caller sends is taken for it."""
_ENCODINGS = ("utf-8", "utf-8-sig")

Ids = tuple[int, ...] | list[tuple[int, ...]]
"""Ids of a field: of one list, or of a list of lists."""


def parse_body_json(body: bytes) -> Work[tuple[Any, dict[str, Ids]]]:
    """The value of a body, and the ids of its long lists by field; in the value such a list is ``[0]`` or ``[[0]]``.

    ``ValueError`` and ``RecursionError`` for what is no JSON, ``InvalidRequestError`` for more of it than is parsed.
    """
    if json.detect_encoding(body) not in _ENCODINGS:
        raise ValueError("it is not encoded in UTF-8")
    found = (yield from _find_lists(body)) if len(body) > LONG_BYTES else []
    rest, start = [], 0
    for place, cut in enumerate(found):
        rest += [body[start : cut.start], f'"{_MARK}{place}"'.encode()]
        start = cut.end
    value = yield from _parse(b"".join([*rest, body[start:]]))
    marks = {cut.field: f"{_MARK}{place}" for place, cut in enumerate(found)}
    if not isinstance(value, dict) or any(value.get(field) != mark for field, mark in marks.items()):
        return (yield from _parse(body)), {}
    ids = {cut.field: cut.ids for cut in found}
    marked = {field: [[0]] if isinstance(lists, list) else [0] for field, lists in ids.items()}
    return {**value, **marked}, ids


def _parse(text: bytes) -> Work[Any]:
    yield from checks_of_json("body", [text])
    return parse_json(text)


@dataclass(frozen=True, slots=True)
class _List:
    """A list of ids: its field, where it begins and ends, and what it holds."""

    field: str
    start: int
    end: int
    ids: Ids


def _find_lists(body: bytes) -> Work[list[_List]]:
    """Long lists of ids in the order of the body."""
    found = []
    for field, bound in _FIELDS.items():
        key = f'"{field}"'.encode()
        position = body.find(key)
        start = _after(body, b":", position + len(key)) if position >= 0 else -1
        cut = (yield from _Reader(body, field, bound).read(start)) if start >= 0 else None
        if cut is not None and cut.end - cut.start > LONG_BYTES:
            found.append(cut)
    found.sort(key=lambda cut: cut.start)
    return found


class _Reader:
    """Reads the ids of one field."""

    def __init__(self, body: bytes, field: str, bound: Bound) -> None:
        self._body, self._field, self._bound = body, field, bound
        self._num_ids = 0

    def read(self, start: int) -> Work[_List | None]:
        """Read the list, or the list of lists, that begins at ``start``; None for anything else."""
        position = _after(self._body, b"[", start)
        if position < 0 or _after(self._body, b"[", position) < 0:
            one = yield from self._read_ids(start)
            return None if one is None else _List(self._field, start, one[1], one[0])
        lists: list[tuple[int, ...]] = []
        while position >= 0 and len(lists) < _MOST_LISTS:
            one = yield from self._read_ids(position)
            if one is None:
                return None
            lists.append(one[0])
            end = _after(self._body, b"]", one[1])
            if end >= 0:
                return _List(self._field, start, end, lists)
            position = _after(self._body, b",", one[1])
        return None

    def _read_ids(self, start: int) -> Work[tuple[tuple[int, ...], int] | None]:
        """The ids of the list that begins at ``start``, and where it ends; None for anything else."""
        body, start = self._body, _after(self._body, b"[", start)
        end = body.find(b"]", start) if start >= 0 else -1
        if end <= start:
            return None
        ids: list[int] = []
        while start < end:
            stop = body.find(b",", start + _SLICE_BYTES, end)
            stop = end if stop < 0 else stop
            found = _parse_ids(body[start:stop])
            if not found:
                return None
            ids += found
            self._num_ids += len(found)
            self._bound.check(self._field, self._num_ids)
            start = stop + 1
            yield
        return None if start == end else (tuple(ids), end + 1)  # equal: the last sign is a comma


def _parse_ids(part: bytes) -> list[int]:
    """Ids between commas; none for anything else, such as blanks between two commas."""
    if part.translate(None, _OF_IDS):
        return []
    try:
        found: list[int] = parse_json(b"[" + part + b"]")
    except ValueError:
        return []
    return found


def _after(body: bytes, sign: bytes, position: int) -> int:
    """Index behind a sign that stands there, blanks apart; -1 if another does."""
    blanks = _BLANKS.match(body, position)
    position = position if blanks is None else blanks.end()
    return position + 1 if body[position : position + 1] == sign else -1
