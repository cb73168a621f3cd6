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


class _StopText:
    """One stop text and how much of it the text so far ends in (Knuth, Morris, Pratt): linear in the text.

    The prefix function is computed as far as the text has matched: a stop text that never matches costs nothing.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Characters of the stop text that end the text so far, fewer than all of them."""
        self._borders = [0]
        """For each beginning of the stop text: length of its longest end, short of itself, that begins it too."""

    def push(self, text: str, *, armed: bool) -> int | None:
        """Go on over more text; where in it the stop text is complete for the first time, if ``armed``."""
        position = 0
        while position < len(text):
            if self.num_matched == 0:
                position = text.find(self.stop[0], position)
                if position < 0:
                    return None
            self._advance(text[position])
            position += 1
            if self.num_matched == len(self.stop):
                if armed:
                    return position
                self.num_matched = self._border(self.num_matched)
        return None

    def _advance(self, character: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._border(self.num_matched)
        if self.stop[self.num_matched] == character:
            self.num_matched += 1

    def _border(self, length: int) -> int:
        """Of the stop text's first ``length`` characters."""
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
        self._stops = [_StopText(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        """Text not given out, since a stop text may begin in it."""

    def push(self, text: str, *, armed: bool = True) -> str | StopMatch:
        """Add text; what is final now, or the match. While not ``armed`` no stop text may end in the added text."""
        if not self._stops:
            return text
        num_held = len(self._held)
        self._held += text
        ends = [
            (num_held + end, -len(stop.stop), stop.stop)
            for stop in self._stops
            if (end := stop.push(text, armed=armed)) is not None
        ]
        return self._match(*min(ends)) if ends else self._release(max(stop.num_matched for stop in self._stops))

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        for stop in self._stops:
            stop.num_matched = 0
        return self._release(0)

    def _match(self, end: int, minus_length: int, stop: str) -> StopMatch:
        return StopMatch(stop, self._held[: end if self._include_stop else end + minus_length])

    def _release(self, keep: int) -> str:
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(released) :]
        return released
