"""The books of a ring: which bytes hold what its reader has not fetched yet. No torch, no clock.

A place is used again only when its reader is done with it, so nothing unread is ever written over. What is not fetched
in time is given up by raising the floor: the writer tells the reader that everything below a sequence number is gone,
and uses the places again when the reader has confirmed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.errors import IntegrityError

ALIGNMENT = 256
"""Alignment of the first byte of a placement."""


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes that the reader may still fetch."""

    begin: int
    end: int
    sequence: int
    placed_at: float


class Ring:
    """Places in ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._uses: dict[int, Use] = {}  # by sequence, oldest first
        self._by_place: list[Use] = []
        """The same, by their first byte."""
        self._next_sequence = 1

    @property
    def num_unread(self) -> int:
        """Uses whose reader is not done."""
        return len(self._uses)

    @property
    def floor(self) -> int:
        """The least sequence number that may still be read."""
        return next(iter(self._uses), self._next_sequence)

    def place(self, sizes: Sequence[int], now: float) -> list[Use] | None:
        """One use for each size, side by side, so that one copy fills them; None where there is no room."""
        found = self._find_room(sum(sizes))
        if found is None:
            return None
        index, begin = found
        placed = []
        for size in sizes:
            placed.append(Use(begin, begin + size, self._next_sequence, now))
            self._next_sequence += 1
            begin += size
        self._uses.update((use.sequence, use) for use in placed)
        self._by_place[index:index] = placed
        return placed

    def finish(self, sequences: Iterable[int]) -> None:
        """The reader is done with these; those that it never had, or was done with, are passed over."""
        done = {sequence for sequence in sequences if self._uses.pop(sequence, None) is not None}
        if done:
            self._by_place = [use for use in self._by_place if use.sequence not in done]

    def expired(self, now: float, deadline_s: float) -> int | None:
        """The floor that gives up all that has waited for longer than a deadline; None when nothing has."""
        late = [use.sequence for use in self._uses.values() if now - use.placed_at > deadline_s]
        return late[-1] + 1 if late else None

    def raise_floor(self, floor: int) -> None:
        """The reader has confirmed that it reads nothing below."""
        self.finish([sequence for sequence in self._uses if sequence < floor])

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` where two uses overlap or one is outside the ring."""
        end = 0
        for use in self._by_place:
            if use.begin < end or use.end > self.capacity or self._uses.get(use.sequence) is not use:
                raise IntegrityError(f"ring: {use} after byte {end} of {self.capacity}")
            end = use.end
        if len(self._by_place) != len(self._uses):
            raise IntegrityError(f"ring: {len(self._by_place)} places and {len(self._uses)} uses")

    def _find_room(self, num_bytes: int) -> tuple[int, int] | None:
        """The lowest gap that is wide enough, since what was used last is in the caches: the number of uses before it,
        and its first byte.
        """
        begin = 0
        for index, use in enumerate(self._by_place):
            if begin + num_bytes <= use.begin:
                return index, begin
            begin = -(-use.end // ALIGNMENT) * ALIGNMENT
        return (len(self._by_place), begin) if begin + num_bytes <= self.capacity else None
