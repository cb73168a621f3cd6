"""Texts that stop a generation, found across token borders.

Owns what text may be given out while a stop text could still be in the making. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop text that was found."""

    stop: str
    text: str
    """Last text to emit; it contains the stop text only if the request includes it."""


class StopText:
    """One stop text and how much of it the text so far ends in (Knuth, Morris, Pratt): linear in the text.

    The prefix function is computed as far as the text has matched: a stop text that never matches costs nothing.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Characters of the stop text that end the text so far, fewer than all of them."""
        self._borders = [0]
        """Border of each prefix of the stop text: length of its longest proper suffix that is a prefix of the text."""

    def peek(self, text: str, *, after: int) -> int | None:
        """Result of ``push`` for text that may yet change: the state stays as it is."""
        num_matched = self.num_matched
        found = self.push(text, after=after)
        self.num_matched = num_matched
        return found

    def push(self, text: str, *, after: int) -> int | None:
        """Go on over more text; where in it the stop text is complete for the first time past ``after``."""
        position = 0
        while position < len(text):
            if self.num_matched == 0:
                position = text.find(self.stop[0], position)
                if position < 0:
                    return None
            self._advance(text[position])
            position += 1
            if self.num_matched == len(self.stop):
                if position > after:
                    return position
                self.num_matched = self.border_of(self.num_matched)
        return None

    def _advance(self, character: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self.border_of(self.num_matched)
        if self.stop[self.num_matched] == character:
            self.num_matched += 1

    def border_of(self, length: int) -> int:
        """Longest border of the stop text's first ``length`` characters."""
        borders, stop = self._borders, self.stop
        while len(borders) < length:
            border, character = borders[-1], stop[len(borders)]
            while border and stop[border] != character:
                border = borders[border - 1]
            borders.append(border + (stop[border] == character))
        return borders[length - 1]


class StopMatcher:
    """Finds the stop text that is complete first; of those complete at once, the one that begins first."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [StopText(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        """Text not given out, since a stop text may begin in it."""
        self._num_unarmed = 0
        """Characters that follow, which have been seen as pending text while not armed."""

    def push(self, text: str, pending: str = "", *, armed: bool = True) -> str | StopMatch:
        """Add text; what is final now, or the match.

        ``pending`` follows it and may yet change: a stop text may end in it, and none of it is given out. While not
        ``armed`` no stop text may end in the added or the pending text.
        """
        if not self._stops:
            return text
        after = self._num_unarmed if armed else len(text) + len(pending)
        self._num_unarmed = max(after - len(text), 0)
        num_held = len(self._held)
        self._held += text
        ends = self._ends([(stop, stop.push(text, after=after)) for stop in self._stops])
        if not ends and pending:
            after = self._num_unarmed
            ends = self._ends([(stop, stop.peek(pending, after=after)) for stop in self._stops], len(text))
            self._held += pending if ends else ""
        if not ends:
            return self._release(max(stop.num_matched for stop in self._stops))
        end, minus_length, stop = min(ends)
        return self._match(num_held + end, minus_length, stop)

    def flush(self) -> str:
        """Text that was held back, when no more comes."""
        for stop in self._stops:
            stop.num_matched = 0
        return self._release(0)

    @staticmethod
    def _ends(found: list[tuple[StopText, int | None]], offset: int = 0) -> list[tuple[int, int, str]]:
        """(where it is complete, minus its length, the stop text) of each that was found."""
        return [(offset + end, -len(stop.stop), stop.stop) for stop, end in found if end is not None]

    def _match(self, end: int, minus_length: int, stop: str) -> StopMatch:
        return StopMatch(stop, self._held[: end if self._include_stop else end + minus_length])

    def _release(self, keep: int) -> str:
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(released) :]
        return released
