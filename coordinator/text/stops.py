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
    """The last text to give out; it holds the stop text only when that was asked for."""


class StopMatcher:
    """Finds the stop text that is complete first; of those complete at once, the one that begins first."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        """Text not given out, since a stop text may begin in it."""
        self._num_immune = 0
        """Characters at the start of ``_held`` in which no stop text may end."""

    def push(self, text: str, *, armed: bool = True) -> str | StopMatch:
        """Add text; what is final now, or the match. While not ``armed`` no stop text may end in the added text."""
        if not self._stops:
            return text
        self._held += text
        if not armed:
            self._num_immune = len(self._held)
        match = self._find()
        return self._release(self._num_undecided()) if match is None else match

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(0)

    def _find(self) -> StopMatch | None:
        ends = [(end, -len(stop), stop) for stop in self._stops if (end := self._first_end(stop)) is not None]
        if not ends:
            return None
        end, _, stop = min(ends)
        return StopMatch(stop, self._held[: end if self._include_stop else end - len(stop)])

    def _first_end(self, stop: str) -> int | None:
        start = self._held.find(stop, max(0, self._num_immune - len(stop) + 1))
        return None if start < 0 else start + len(stop)

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        return max(self._overlap(stop) for stop in self._stops)

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)

    def _release(self, keep: int) -> str:
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(released) :]
        self._num_immune = max(0, self._num_immune - len(released))
        return released
