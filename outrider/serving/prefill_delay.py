"""Whether a prompt's chunk had better wait for the running sessions that will soon be back.

A running session is away between its answer and its next item. A chunk that starts meanwhile makes it wait for a whole
forward, and then for its own; one that waits is served beside it in the same. So a chunk waits where it would not be
done before they are back, by what was seen of both lately. Owns these figures. Knows no clock and computes nothing.
"""

from __future__ import annotations

from outrider.serving.moving_mean import moving_mean
from outrider.serving.session_table import SessionKey

_NEW = 0.2
"""The weight of what was seen last."""
_LATE = 1.5
"""Who is away for so many times longer than usual is not waited for."""
LONGEST_ABSENCE_NS = 100_000_000
"""Who is away for longer was held up by something else, and is neither waited for nor counted."""


class PrefillDelayPolicy:
    """Times are in nanoseconds of one clock."""

    def __init__(self) -> None:
        self._left: dict[SessionKey, int] = {}  # when each of those away was answered
        self._away_ns: float | None = None
        self._chunk_ns: float | None = None

    def note_answer(self, key: SessionKey, now_ns: int) -> None:
        """A running session was answered."""
        self._left[key] = now_ns

    def note_return(self, key: SessionKey, now_ns: int) -> None:
        """A session has sent its next item."""
        left = self._left.pop(key, None)
        # Who asks for something else before it was answered comes before it left.
        if left is not None and 0 <= now_ns - left <= LONGEST_ABSENCE_NS:
            self._away_ns = moving_mean(self._away_ns, now_ns - left, _NEW)

    def note_end(self, key: SessionKey) -> None:
        """It will not be back."""
        self._left.pop(key, None)

    def drop_link(self, link_id: int) -> None:
        """None of its sessions will be back."""
        self._left = {key: left for key, left in self._left.items() if key[0] != link_id}

    def note_chunk(self, duration_ns: int) -> None:
        """A forward with a prompt's chunk took so long."""
        self._chunk_ns = moving_mean(self._chunk_ns, duration_ns, _NEW)

    def wait_ns(self, now_ns: int) -> int:
        """For how long a chunk had better wait, if nobody is back before; 0: it may go."""
        if self._away_ns is None or self._chunk_ns is None:
            return 0
        away, prefill_delay = self._away_ns, min(_LATE * self._away_ns, LONGEST_ABSENCE_NS)
        lefts = [left for left in self._left.values() if now_ns - left < prefill_delay]
        if not lefts or now_ns + self._chunk_ns <= min(lefts) + away:
            return 0
        return int(max(lefts) + prefill_delay) - now_ns
