"""Hidden states of one session on their way from its target to its draft, bytes or references passed on as they are.

The buffer covers a run of positions: it begins where the draft needs the next one, and ends where the target has to go
on. Where the two disagree, because either side lost the session, or something else came, it is emptied, and the target
computes from where the draft is: state goes by length, as everywhere.
"""

from __future__ import annotations

from collections import deque

from outrider.types import HiddenStates

MAX_FEED_BYTES = 48 << 20
"""Most that one ``Extend`` brings, of a first part at least, and that one ``Score`` asks for: a long text's states go
in several. The target is asked for more when less than that waits for the draft, so a session holds up to twice that.
"""


class HiddenStateBuffer:
    """States of the positions from ``start`` to ``end`` - 1."""

    def __init__(self) -> None:
        self.start = 0
        self._parts: deque[HiddenStates] = deque()

    @property
    def end(self) -> int:
        """One past the last position."""
        return self._parts[-1].end if self._parts else self.start

    @property
    def num_rows(self) -> int:
        """Positions whose states were not sent to the draft yet."""
        return self.end - self.start

    @property
    def is_full(self) -> bool:
        """True if it holds as much as one ``Extend`` brings."""
        return sum(part.num_bytes for part in self._parts) >= MAX_FEED_BYTES

    def clear(self, start: int = 0) -> None:
        """Hold nothing, and go on at ``start``."""
        self._parts.clear()
        self.start = start

    def move_to(self, start: int) -> None:
        """The draft needs states from ``start`` on; what comes before is forgotten."""
        if not self.start <= start <= self.end:
            self.clear(start)
            return
        self.start = start
        while self._parts and self._parts[0].end <= start:
            self._parts.popleft()
        if self._parts and self._parts[0].start < start:
            first = self._parts[0]
            self._parts[0] = first.between(start, first.end)

    def put(self, states: HiddenStates, end: int) -> None:
        """Append what of these goes on from here, up to the position before ``end``. Others are ignored."""
        before = self._parts[-1] if self._parts else states
        if (states.width, states.dtype) != (before.width, before.dtype):
            return
        first, last = self.end, min(end, states.end)
        if states.start <= first < last:
            self._parts.append(states.between(first, last))

    def first_part(self) -> HiddenStates | None:
        """States for the next ``Extend``, all inline or all by reference; None without any."""
        chosen: list[HiddenStates] = []
        num_bytes = 0
        for part in self._parts:
            num_bytes += part.num_bytes
            if chosen and (num_bytes > MAX_FEED_BYTES or bool(part.references) != bool(chosen[0].references)):
                break
            chosen.append(part)
        return chosen[0].followed_by(chosen[1:]) if chosen else None
