"""Bad words of a session: the tokens that would complete one of them.

Words are kept by their beginnings, all tokens but the last, read backwards and sorted. A beginning that ends a text is
a prefix of the text read backwards. All such prefixes are the entry that stands before that text in the order, or
prefixes of this entry. So a text is looked up once, whatever number of words there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Tokens = tuple[int, ...]


class BadWords:
    """Bad words of two or more tokens."""

    __slots__ = ("_beginnings", "_last_ids", "_longest", "_parents")

    def __init__(self, words: Iterable[Tokens]) -> None:
        last_ids: dict[Tokens, list[int]] = {}
        for word in words:
            last_ids.setdefault(word[-2::-1], []).append(word[-1])
        self._beginnings = sorted(last_ids)
        self._last_ids = [last_ids[beginning] for beginning in self._beginnings]
        self._parents = _longest_prefixes(self._beginnings)
        self._longest = max(map(len, self._beginnings), default=0)

    def __bool__(self) -> bool:
        return bool(self._beginnings)

    def completed(self, tokens: Sequence[int], start: int, length: int) -> list[int]:
        """Last tokens of the words whose other tokens end ``tokens[start:length]``."""
        backwards = tuple(tokens[max(start, length - self._longest) : length])[::-1]
        place = bisect_right(self._beginnings, backwards) - 1
        num_common = _num_common(self._beginnings[place], backwards) if place >= 0 else 0
        found: list[int] = []
        while place >= 0:
            if len(self._beginnings[place]) <= num_common:
                found += self._last_ids[place]
            place = self._parents[place]
        return found


def _longest_prefixes(entries: Sequence[Tokens]) -> list[int]:
    """Index, for each sorted entry, of the longest other entry that is its prefix; -1: there is none."""
    open_indices: list[int] = []
    indices: list[int] = []
    for place, entry in enumerate(entries):
        while open_indices and not _begins_with(entry, entries[open_indices[-1]]):
            open_indices.pop()
        indices.append(open_indices[-1] if open_indices else -1)
        open_indices.append(place)
    return indices


def _begins_with(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning


def _num_common(one: Tokens, other: Tokens) -> int:
    """Number of leading tokens that are the same."""
    if _begins_with(other, one):  # nearly always, where any are
        return len(one)
    return next(i for i, (mine, its) in enumerate(zip((*one, -1), (*other, -2), strict=False)) if mine != its)
